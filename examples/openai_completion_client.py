"""Complete a prompt with the official openai client (pip install openai), without and with streaming.

python examples/openai_completion_client.py [--base-url http://localhost:9000/v1] [--api-key KEY] [--model NAME]
"""

import argparse

from openai import OpenAI


def main() -> None:
    """Request two completions, then stream one token by token."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--base-url", default="http://localhost:9000/v1")
    flags.add_argument("--api-key", default="EMPTY", help="any text if the server requires no key")
    flags.add_argument("--model", help="default: the first model that the server lists")
    args = flags.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id
    prompt = "A robot may not injure a human being"

    completion = client.completions.create(model=model, prompt=prompt, n=2, max_tokens=16, logprobs=3)
    for choice in completion.choices:
        print(f"{choice.index}: {choice.text!r} ({choice.finish_reason})")
    print("tokens:", completion.usage.total_tokens if completion.usage else "not reported")

    for chunk in client.completions.create(model=model, prompt=prompt, max_tokens=16, stream=True):
        print(chunk.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
