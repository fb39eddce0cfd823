"""Ask a model some questions. Copy this into a program of your own.

python example.py                            # the bundled model: no download
python example.py --model Qwen/Qwen3-0.6B    # a hub id, a directory or a GGUF file
"""

import argparse
import sys
from typing import Any

from nanoengine import LLM, SamplingParams

QUESTIONS = [
    "Who are you?",
    "What is 27 + 58?",
    "Spell the word attention backwards.",
    "Remember this passage: The hungry fox stole the red apple behind a market. "
    "Here is some noise: The tall baker followed the blue wagon inside a village. Repeat the passage.",
    "Count from 8 to 21.",
]


def main() -> None:
    """Ask all questions but the last at once, and stream the answer to the last."""
    parser = argparse.ArgumentParser(description="Ask a model some questions.")
    parser.add_argument("--model", default="demo", help="a hub id, a directory or a GGUF file")
    llm = LLM(parser.parse_args().model)
    params = SamplingParams(temperature=0.0, max_tokens=256)  # 0.0 always takes the most probable token

    prompts: list[Any] = list(QUESTIONS)  # a chat model expects its template around a question
    if getattr(llm.get_tokenizer(), "chat_template", None):
        prompts = llm.render_chat([[{"role": "user", "content": question}] for question in QUESTIONS])

    outputs = llm.generate(prompts[:-1], params)  # one batch: each step makes a token of every answer
    for question, output in zip(QUESTIONS, outputs, strict=False):
        print(f"\nQ ({len(output.prompt_token_ids)} tokens): {question}\nA: {output.outputs[0].text}")

    print(f"\nQ (streamed): {QUESTIONS[-1]}\nA: ", end="")
    for output in llm.stream(prompts[-1], params):
        print(output.outputs[0].text, end="", flush=True)  # the text since the output before
    print()


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # the model is missing or cannot be served
        sys.exit(f"example.py: {error}")
