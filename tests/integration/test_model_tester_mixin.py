"""transformers' own tests of a model, on the sparse model of every family beside the dense one."""

import importlib
import re
import sys
import types
import unittest
from pathlib import Path

import pytest
import transformers
from tiny_families import tiny_dense

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import upcycle
from clip_moe.conversion.verification import sample_inputs
from modeling_clip_moe.families import FAMILIES, IMAGE_TOWERS

# `make test-integrations` puts the tests of transformers' source distribution there
SOURCES = Path(sys.prefix) / f"transformers-{transformers.__version__}"
EMBEDDINGS = ("image_embeds", "text_embeds", "pooler_output")
DIFFERENT = {
    # An incomplete checkpoint is an error for sparse models
    "test_model_weights_reload_no_missing_tied_weights",
    # It loses the gradient of the router losses, and is refused
    "test_training_gradient_checkpointing_use_reentrant_true",
}


@pytest.fixture(scope="module")
def common(request):
    """Its module of tests. The distribution leaves out the mixins of export and generation, which no CLIP has."""
    if not SOURCES.is_dir():
        pytest.skip(f"{SOURCES} is missing: run `make test-integrations`, which fetches transformers' own tests")
    source = (SOURCES / "tests/test_modeling_common.py").read_text()
    for marker in set(re.findall(r"@(?:pytest\.)?mark\.(\w+)", source)):
        request.config.addinivalue_line("markers", f"{marker}: of transformers' tests")
    modules = {
        "tests": {"__path__": [str(SOURCES / "tests")]},
        "tests.exporters": {},
        "tests.exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
        "tests.generation": {},
        "tests.generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, members in modules.items():
            module = types.ModuleType(name)
            vars(module).update(members)
            patch.setitem(sys.modules, name, module)
        common = importlib.import_module("tests.test_modeling_common")
        # Its own function compares logits, which no CLIP has
        patch.setattr(
            common, "_get_output_tensors", lambda output: [output[name] for name in EMBEDDINGS if name in output]
        )
        yield common


def outcomes(common, model) -> dict[str, str]:
    """Each of its tests' outcome: "" where it passed, "skipped", or the error."""
    config = model.config

    class Tester:
        is_training = hasattr(config, "text_config")  # an image tower alone has no loss
        batch_size = 2

        def get_config(self):
            return type(config).from_dict(config.to_dict())

        def prepare_config_and_inputs_for_common(self):
            return self.get_config(), sample_inputs(config)

    Tester.text_model_tester = Tester.vision_model_tester = Tester()

    class Case(common.ModelTesterMixin, unittest.TestCase):
        all_model_classes = (type(model),)
        _is_composite = Tester.is_training
        test_resize_embeddings = False
        has_attentions = False

        def setUp(self):
            self.model_tester = Tester()

        def _prepare_for_class(self, inputs, model_class, return_labels=False):
            loss = {"return_loss": True} if return_labels else {}
            return super()._prepare_for_class(inputs, model_class) | loss

    outcome_of = {}
    for name in unittest.TestLoader().getTestCaseNames(Case):
        result = unittest.TestResult()
        Case(name).run(result)
        errors = result.failures + result.errors
        outcome_of[name] = errors[0][1] if errors else "skipped" if result.skipped else ""
    return outcome_of


@pytest.mark.parametrize("family", (*FAMILIES, *IMAGE_TOWERS), ids=lambda family: family.model_type)
def test_the_sparse_model_passes_what_the_dense_one_does(common, family):
    dense = tiny_dense(family)
    expected, sparse = (outcomes(common, model) for model in (dense, upcycle(dense, PRESETS["clip_moe"])))
    passed = [name for name, error in expected.items() if not error]
    assert len(passed) > 40
    fine = ("", "skipped")  # a test that is skipped of a dense model may run of a sparse one
    failed = {name: sparse[name] for name in sparse if expected[name] in fine and sparse[name] not in fine}
    assert failed.keys() <= DIFFERENT, "\n".join(failed.values())
