"""How long are the translations of the small Table 2, and does BLEU punish it?

    python experiments/table2_lengths.py KIND --seed 1 --run-dir DIR --out FILE

Reads the weights that a run of table2.py has saved after the recipe's last update, and
translates the test set once more. By the number of words in the source: BLEU, its
brevity penalty, and the length of all translations as a multiple of the references'.

Record: results/table2-lengths/*.json
"""

import sys

import sacrebleu
from table2 import arguments, made, max_length, translated

from transformer_lib.corpora import load_corpus
from transformer_lib.fine_tuning import recipe_for
from transformer_lib.machine import environment_record
from transformer_lib.runs.checkpoints import load_tensors, load_weights
from transformer_lib.runs.setup import ready_data
from transformer_lib.storage import write_json

UP_TO = (5, 8, 12, 20, 1000)  # words of the source


def by_length(sources: list[str], references: list[str], outputs: list[str]) -> dict:
    """Scores for all sentences, and for those of like length: "all", "5", "8", ..."""
    words = [len(source.split()) for source in sources]
    classes = {"all": range(len(words))}
    for low, high in zip((0, *UP_TO), UP_TO, strict=False):
        classes[str(high)] = [i for i, n in enumerate(words) if low < n <= high]
    found = {}
    for name, some in classes.items():
        if not some:
            continue
        score = sacrebleu.corpus_bleu(
            [outputs[i] for i in some], [[references[i] for i in some]]
        )
        found[name] = {
            "sentences": len(some),
            "BLEU": score.score,
            "brevity_penalty": score.bp,
            "length": score.sys_len / score.ref_len,
        }
    return found


def main(given: list[str]) -> None:
    asked = arguments(given)
    recipe = recipe_for(asked.recipe, asked.data, asked.set)
    ready = ready_data(recipe, asked.run_dir)
    model = made(asked.kind, recipe, ready.tokenizer.vocab_size).eval()
    file = asked.run_dir / f"step-{recipe.max_steps:06d}.safetensors"
    load_weights(model, load_tensors(file)[0])
    pairs = load_corpus(recipe.corpus, "test").pairs
    sources, references = (list(side) for side in zip(*pairs, strict=True))
    outputs = translated(model, ready.tokenizer, sources, max_length(recipe))
    record = {
        "kind": asked.kind,
        "seed": asked.seed,
        "step": recipe.max_steps,
        "environment": environment_record("cpu"),
        "by_length": by_length(sources, references, outputs),
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(asked.out, record)


if __name__ == "__main__":
    main(sys.argv[1:])
