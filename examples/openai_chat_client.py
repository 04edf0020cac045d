"""Chat with the official openai client (pip install openai), and use fields that the OpenAI API lacks.

python examples/openai_chat_client.py [--base-url http://localhost:9000/v1] [--api-key KEY] [--model NAME]
"""

import argparse

from openai import OpenAI


def main() -> None:
    """Request an answer, stream one, and constrain two: to a list of choices, and to a JSON schema."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--base-url", default="http://localhost:9000/v1")
    flags.add_argument("--api-key", default="EMPTY", help="any text if the server requires no key")
    flags.add_argument("--model", help="default: the first model that the server lists")
    args = flags.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Where is the Louvre?"},
        ],
        max_tokens=32,
    )
    print(answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Count to five."}],
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens")

    mood = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Is this sentence friendly: have a nice day!"}],
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}, "top_k": 20},
    )
    print(mood.choices[0].message.content)

    city = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Paris as JSON, please."}],
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "city",
                "schema": {
                    "type": "object",
                    "properties": {"name": {"enum": ["Paris"]}, "is_capital": {"type": "boolean"}},
                    "required": ["name", "is_capital"],
                    "additionalProperties": False,
                },
            },
        },
        max_tokens=64,
    )
    print(city.choices[0].message.content)


if __name__ == "__main__":
    main()
