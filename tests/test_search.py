"""What people type into the book's search, and the pages that must be among the first.

The queries are those of readers, as they ask in public.
"""

import sys

import pytest
from built import HTML, ROOT, documents, need_the_book

sys.path.append(str(ROOT / "book" / "_ext"))
from sections import gather

need_the_book()

FIRST = 5  # results that a reader looks at
MISSED = 10  # queries, at most, whose answer is not among them
HITS = "#search-results li a"
# Where an answer is: names of chapters, of hoods, and of pages under book/.
QUERIES = {
    "loss not decreasing": "glossary",
    "loss stuck": "16_diagnosis questions",
    "loss too low too soon": "16_diagnosis questions",
    "nan loss": "16_diagnosis questions",
    "gradient clipping": "glossary 11_objective 13_runs 16_diagnosis",
    "loss scaling": "glossary 21_speed 16_diagnosis",
    "repetition": "16_diagnosis glossary",
    "loops": "14_decoding 16_diagnosis",
    "repeats": "14_decoding 16_diagnosis glossary",
    "translation too short": "16_diagnosis glossary",
    "hallucination": "16_diagnosis questions glossary",
    "overfitting": "16_diagnosis glossary",
    "BLEU near 0": "16_diagnosis questions",
    "token accuracy": "16_diagnosis questions glossary",
    "worse after resuming": "16_diagnosis questions",
    "troubleshooting": "glossary",
    "CUDA out of memory": "20_fine_tuning",
    "gradient accumulation": "glossary 12_training 20_fine_tuning",
    "reproducibility": "16_diagnosis glossary",
    "deterministic": "16_diagnosis glossary",
    "fine-tuning": "20_fine_tuning glossary",
    "catastrophic forgetting": "20_fine_tuning",
    "add new tokens": "20_fine_tuning glossary",
    "OPUS-MT": "20_fine_tuning 22_export glossary",
    "start symbol": "06_decoder 22_export glossary",
    "Marian start symbol": "22_export 20_fine_tuning 16_diagnosis",
    "multilingual": "20_fine_tuning",
    "small dataset": "20_fine_tuning",
    "colab": "13_runs how_to_read glossary",
    "colab disconnects": "13_runs how_to_read questions",
    "warmup": "11_objective glossary",
    "larger batch warm-up": "11_objective questions glossary",
    "learning rate decay": "11_objective glossary",
    "why beta2 0.98": "11_objective",
    "prefetch": "10_batches glossary",
    "residual scale": "05_encoder glossary",
    "residual scaling": "05_encoder glossary",
    "KLDivLoss": "16_diagnosis questions",
    "label smoothing": "11_objective glossary",
    "padding mask": "02_attention 05_encoder 06_decoder glossary",
    "teacher forcing": "12_training 16_diagnosis glossary",
    "kv cache": "14_decoding glossary",
    "beam search": "14_decoding glossary",
    "why divide by sqrt": "02_attention questions",
    "flash attention": "02_attention 29_long_text glossary",
    "inference": "glossary 14_decoding 17_translator 21_speed 07_transformer 22_export",
    "deploy": "18_command_line 22_export glossary",
    "fp16": "12_training 21_speed 13_runs glossary 14_decoding 16_diagnosis",
    "mixed precision": "12_training 21_speed glossary",
    "pre-trained model": "19_shipped_model 20_fine_tuning 17_translator glossary",
    "RoPE": "28_family 04_positions glossary",
    "rotary positions": "28_family 04_positions glossary",
    "multi-GPU": "12_training 21_speed glossary",
    "several GPUs": "12_training 21_speed glossary how_do_i",
    "back-translation": "20_fine_tuning glossary how_do_i",
    "how do I cite": "how_do_i",
    "compare two systems": "15_evaluation how_do_i",
    "train on my own data": "how_do_i 18_command_line 08_corpora",
    "transformer from scratch": "07_transformer 01_hello welcome glossary how_to_read",
    "latency": "21_speed 18_command_line 14_decoding glossary",
    "low-resource": "20_fine_tuning glossary",
    "hyperparameters": "13_runs 25_ablations 11_objective glossary",
    "text generation": "14_decoding 28_family glossary",
    "keep HTML tags": "17_translator 18_command_line 19_shipped_model",
    "URLs in text": "17_translator 19_shipped_model",
    "map_location": "13_runs",
    "state_dict module prefix": "13_runs",
    "gradient checkpointing": "12_training 20_fine_tuning glossary",
    "target prefix": "14_decoding 17_translator glossary",
    "force the first words of the translation": "14_decoding 17_translator glossary",
    "Chinese BLEU": "15_evaluation",
    "Japanese tokenization": "15_evaluation 09_tokenizer 17_translator",
    "word2vec": "20_fine_tuning glossary",
    "GloVe": "20_fine_tuning glossary",
    "LoRA": "20_fine_tuning glossary",
    "freeze layers": "20_fine_tuning glossary",
    "zero-shot translation": "20_fine_tuning glossary",
    "pivot language": "20_fine_tuning glossary",
    "ALiBi": "28_family glossary 04_positions",
    "relative position bias": "28_family 04_positions glossary",
    "bahdanau attention": "00_why under_the_hood/00_why glossary",
    "query key value": "01_hello glossary welcome 02_attention",
    "nn.Transformer": "07_transformer pytorch under_the_hood/07_transformer",
    "key_padding_mask": "pytorch 02_attention 07_transformer "
    "under_the_hood/07_transformer 06_decoder",
    "tgt_mask": "07_transformer under_the_hood/07_transformer pytorch 06_decoder",
    "nested tensor": "05_encoder under_the_hood/05_encoder",
    "batch norm or layer norm": "05_encoder under_the_hood/05_encoder glossary",
    "clean noisy parallel data": "08_corpora glossary",
    "vocabulary size too high": "09_tokenizer",
    "sentencepiece": "09_tokenizer glossary",
    "GPU utilization low": "10_batches 21_speed glossary",
    "ignore_index": "11_objective pytorch",
    "shift labels right": "11_objective 12_training 06_decoder 07_transformer "
    "10_batches",
    "how long does training take": "13_runs 18_command_line 21_speed "
    "19_shipped_model how_to_read",
    "larger beam worse": "14_decoding",
    "length penalty": "14_decoding glossary",
    "ensemble": "14_decoding glossary 13_runs",
    "exposure bias": "16_diagnosis 12_training glossary",
    "loss goes up but BLEU goes up": "16_diagnosis",
    "good on validation bad on test": "16_diagnosis",
    "out of memory after hundreds of steps": "16_diagnosis 20_fine_tuning",
    "document translation context": "17_translator",
    "mBART": "20_fine_tuning 28_family glossary",
    "int8 quantization": "22_export 21_speed glossary",
    "left padding": "28_family glossary",
    "decoder-only": "28_family glossary",
    "confidence score": "15_evaluation 14_decoding 17_translator glossary",
    "weight tying": "07_transformer glossary",
    "xavier initialization": "07_transformer under_the_hood/07_transformer glossary "
    "05_encoder",
    "pre-norm vs post-norm": "05_encoder under_the_hood/05_encoder glossary "
    "25_ablations",
    "positional encoding": "04_positions glossary",
    "checkpoint averaging": "12_training 13_runs glossary",
    "perplexity": "11_objective glossary",
    "scale embeddings by sqrt(d_model)": "07_transformer under_the_hood/07_transformer "
    "05_encoder 04_positions glossary",
    "ONNX": "22_export glossary",
    "chrF": "15_evaluation glossary",
    "COMET": "15_evaluation glossary",
    "byte fallback": "09_tokenizer glossary",
    "temperature sampling": "14_decoding 28_family glossary",
    "speculative decoding": "14_decoding 21_speed 29_long_text glossary",
    "sacrebleu signature": "15_evaluation glossary",
    "torch.compile": "21_speed 12_training 16_diagnosis",
    "attention is not explanation": "27_looking_inside",
    "number of parameters": "07_transformer 25_ablations under_the_hood/07_transformer",
}


def hits(page) -> list[str]:
    return page.eval_on_selector_all(HITS, "all => all.map(a => a.pathname + a.hash)")


@pytest.fixture(scope="module")
def found(window, site):
    """The first results of each query, as one types them one after the other."""
    page, _ = window
    page.goto(f"{site}/search.html")
    field = ".bd-search-container input[name=q]"
    page.wait_for_selector("#search-results .search-summary", state="attached")
    answers = {}
    for query in QUERIES:
        page.fill(field, query)
        answers[query] = hits(page)[:FIRST]
    return answers


def test_queries_lead_to_their_answers(found):
    def name(path):
        whole = path.split(".html")[0].strip("/")
        return whole.removeprefix("notebooks/").removeprefix("book/")

    missed = {
        query: [path.strip("/") for path in paths]
        for query, paths in found.items()
        if not {name(path) for path in paths} & set(QUERIES[query].split())
    }
    assert len(QUERIES) >= 120
    assert len(missed) <= MISSED, missed


def test_results_open_at_a_section(found):
    paths = [path for paths in found.values() for path in paths]
    assert sum("#" in path for path in paths) > 0.8 * len(paths)


def test_a_result_opens_at_its_section_with_the_words_marked(window, site):
    page, _ = window
    page.goto(f"{site}/search.html?q=label+smoothing")
    page.wait_for_selector(HITS)
    with page.expect_navigation():
        page.click(HITS)
    assert page.evaluate("() => document.querySelector(location.hash) !== null")
    page.wait_for_selector("article .highlighted", state="attached")
    marked = page.eval_on_selector_all(
        "article .highlighted", "all => all.map(e => e.textContent.toLowerCase())"
    )
    assert "smoothing" in marked


@pytest.mark.parametrize(
    "query", ["label_smoothing", "label smoothing", "labelsmoothing"]
)
def test_an_identifier_is_found_in_each_writing(window, site, query):
    page, _ = window
    page.goto(f"{site}/search.html?q={query}")
    page.wait_for_selector(HITS)
    assert any("11_objective" in path for path in hits(page)[:FIRST])


def test_nothing_found_is_said(window, site):
    page, _ = window
    page.goto(f"{site}/search.html?q=xyzzyq")
    page.wait_for_selector("text=Nothing was found")


def test_the_list_is_that_of_the_pages():
    """Each address leads somewhere, and no code or output is in the text."""
    records = gather(HTML, documents())
    pages = {}
    for record in records:
        page, _, anchor = record["id"].partition("#")
        text = pages.setdefault(page, (HTML / page).read_text("utf-8"))
        assert not anchor or f'id="{anchor}"' in text, record["id"]
    assert not [r["id"] for r in records if "import torch" in r["text"]]
    terms = {r["title"]: r for r in records if r["kind"] == "term"}
    assert "CUDA out of memory, out of memory" in terms
    assert "beam search" in terms and terms["beam search"]["text"].startswith(
        "Decoding"
    )
