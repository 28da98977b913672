"""Measuring in Python, cell by cell (`# %%` marks what notebook editors take for one). The command is `eagle3-hf eval`.

    python examples/evaluation.py [TARGET DRAFT FOLDER]

FOLDER gets the results file and the page.
"""

# %%
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_hf import AutoEagle3Target, Eagle3DraftModel, resolve_model
from eagle3_hf.evaluation.harness import Harness, Task
from eagle3_hf.evaluation.methods import Method, Models, make_methods, register
from eagle3_hf.evaluation.prompts import Prompt
from eagle3_hf.evaluation.report import render
from eagle3_hf.evaluation.results import ResultsWriter, read_results
from eagle3_hf.evaluation.summary import summarise

DRAFT = Path(__file__).parents[1] / "recipes" / "smollm2-135m-instruct" / "draft"
TEXTS = ["What is 2 + 2?", "Count from one to twenty.", "Write a haiku about the sea."]

# %%
# A dataset is a list of conversations. `load_prompts` reads files, the named sets and the Hub.
PROMPTS = [Prompt("mine", index, str(index), "", (text,)) for index, text in enumerate(TEXTS)]


# %%
# A method of your own is a function that says which model's generate() to call, and how.
@register("shy", "shy: a chain that stops drafting where the draft is unsure")
def shy(models: Models, argument: str) -> Method:
    options = {"assistant_model": models.draft, "num_assistant_tokens": 6, "assistant_confidence_threshold": 0.3}
    return Method("shy chain", models.target, options)


# %%
def main(
    target_name: str = "smollm2", draft_path: str = str(DRAFT), folder: str = ".", max_new_tokens: int = 48
) -> None:
    path = resolve_model(target_name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    models = Models(
        plain=AutoModelForCausalLM.from_pretrained(path).eval(),  # untouched: the baseline
        target=AutoEagle3Target.from_pretrained(path).eval(),
        draft=Eagle3DraftModel.from_pretrained(draft_path).eval(),
    )
    methods = make_methods(["prompt-lookup", "chain:2", "chain:4", "shy", "tree:4:3:12"], models)

    # Results are kept as they come: run this again after a break, and it goes on where it stopped.
    results_file = Path(folder) / "evaluation.jsonl"
    settings = {"target": target_name, "draft": draft_path, "max_new_tokens": max_new_tokens, "temperature": 0.0}
    with ResultsWriter(results_file, settings) as writer:
        task = Task(options={"do_sample": False, "max_new_tokens": max_new_tokens})
        harness = Harness(methods, tokenizer, {"mine": PROMPTS}, writer, task)
        writer.add_session({"methods": [method.facts(models) for method in methods]})
        harness.run()

    results = read_results(results_file)
    for name, entry in summarise(results)["batches"]["1"]["datasets"]["mine"].items():
        tau = "   -" if entry["tau"] is None else f"{entry['tau']:.2f}"
        print(f"{name:<18} tau {tau}  speed-up {entry['speedup']['total']:.2f}  identical {entry['lossless']:.0%}")
    page = results_file.with_suffix(".html")
    page.write_text(render(results, "html"), encoding="utf-8")
    print(f"wrote {page}")


# %%
if __name__ == "__main__":
    main(*sys.argv[1:])
