"""Print vectors of texts and similarity scores: `python examples/offline_inference/vectors.py --model FOLDER`."""

from pdserve import LLM, EngineArgs, FlexibleArgumentParser, print_embeddings

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]
QUERY = "What is the capital of France?"
DOCUMENTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]


def main() -> None:
    """Embed and score."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="Vectors and scores of a few texts."))
    parser.set_defaults(runner="pooling", enforce_eager=True)
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args()))
    for prompt, vector in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
        print(f"prompt: {prompt!r}")
        print_embeddings(vector.outputs.embedding)
    for document, score in zip(DOCUMENTS, llm.score(QUERY, DOCUMENTS), strict=True):
        print(f"score: {score.outputs.score:.3f} {document!r}")


if __name__ == "__main__":
    main()
