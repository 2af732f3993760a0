"""What a train stage says of its pairs: captions that are cut, words in pieces, streams that break."""

import logging
import math

import pytest
from tiny_runs import DENSE, HARBOR_CAPTIONS, TUNED, losses
from tiny_sources import rows, saved_pairs

from data import symbols
from data.tokenizer import pieces_per_word


@pytest.mark.parametrize("streaming", [False, True])
def test_training_says_into_how_many_pieces_a_word_falls(run, tmp_path, caplog, streaming):
    foreign = saved_pairs(tmp_path / "pairs", HARBOR_CAPTIONS) | {"streaming": streaming, "in_memory": not streaming}
    caplog.set_level(logging.WARNING)
    run([DENSE, {**TUNED, "data": foreign}])
    expected = pieces_per_word(symbols.build_tokenizer(16), HARBOR_CAPTIONS)
    warnings = [record.getMessage() for record in caplog.records if "pieces" in record.getMessage()]
    assert len(warnings) == 1 and expected > 2
    assert f"{expected:.1f} pieces" in warnings[0] and "tuned" in warnings[0] and "tokenizer stage" in warnings[0]


@pytest.mark.parametrize("captions", [["a harbour", None] * 8, [["a harbour", None], None, [None], []] * 4])
def test_training_on_a_stream_leaves_missing_captions_out(run, tmp_path, captions, caplog):
    rows(captions).to_parquet(tmp_path / "x.parquet")
    data = {"source": str(tmp_path / "x.parquet"), "streaming": True, "max_unreadable": 0.9}
    (loss,) = losses(run([DENSE, {**TUNED, "data": data}]) / "tuned")
    # The four captions are the same, so that nothing tells the pairs apart but their gray
    assert loss == pytest.approx(math.log(4), abs=0.2)
    assert "its caption is empty" in caplog.text


def test_training_on_a_stream_of_numbers_ends_in_one_line(run, tmp_path):
    rows(range(8)).to_parquet(tmp_path / "x.parquet")
    data = {"source": str(tmp_path / "x.parquet"), "streaming": True}
    with pytest.raises(ValueError, match="^tuned: 8 of 8 pairs .*its caption is no text but [0-7]. [^\n]*$"):
        run([DENSE, {**TUNED, "data": data}])


def test_training_on_words_that_are_known_says_nothing(run, caplog):
    caplog.set_level(logging.WARNING)
    run([DENSE, {**TUNED, "data": {"source": "symbols", "num_samples": 8}}])
    assert "pieces" not in caplog.text


def test_captions_that_are_cut_are_reported_before_training(run, caplog):
    run([DENSE, {**TUNED, "data": {"source": "symbols", "num_samples": 40, "captions": "detailed"}}])
    assert "100.0% of the captions of symbols (40 looked at) are longer than the 16 tokens" in caplog.text
