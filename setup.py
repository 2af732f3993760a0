"""Installs CLIP-MoE.

Two packages: ``modeling_clip_moe``, and ``clip_moe`` with the other rooms in it, which in a checkout are links to the
folders of their names.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

REPOSITORY = "https://github.com/OWNER/clip-moe"
ROOMS = ("engine", "data", "conversion", "evaluation", "training", "app")
FILES = ("LICENSE", "model_cards/template.md", "model_cards/citations.yaml")  # of `clip-moe publish`
training = [
    "accelerate>=1.15",
    "datasets>=5.0.1",  # file names in metadata cannot leave their folder
    "filelock>=4.0",
    "markdown-it-py>=4.0",
    "matplotlib>=3.9",
    "pillow>=12",
    "psutil>=6.0",
    "pydantic>=2.14",
    "pyyaml>=6.0",
    "scikit-learn>=1.6",
    "threadpoolctl>=3.5",
    "tqdm>=4.66",
]
# Captions embedded by a sentence encoder
sentence = ["sentence-transformers>=6.2"]
# The pictures of data.icons, and what draws them
icons = ["mkdocs-material>=9.8.2", "resvg-py>=0.5"]
test = [
    *training,
    *sentence,
    "hypothesis>=6.100",
    "import-linter>=2.3",
    "pytest>=8.3",
    "pytest-randomly>=3.16",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.15",
    "tensorboard>=2.18",
]
# The page of `clip-moe app`. gradio takes no Pillow 13: see the Makefile
app = [*training, "gradio>=6.31"]
# clip-benchmark comes without its own requirements: see the Makefile
integrations = [
    *test,
    *icons,
    "diffusers>=0.42",
    "mteb>=2.26",
    "onnx>=1.23",
    "onnxruntime>=1.31",
    "onnxscript>=0.7",
    "parameterized>=0.9",
    "peft>=0.21",
    "torchao>=0.18",
    "wandb>=0.31",
]


class Wheel(build_py):
    """Puts the rooms, and what they read, into the package `clip_moe` of a wheel."""

    def run(self):
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib, "clip_moe")
            for room in ROOMS:
                shutil.rmtree(package / room, ignore_errors=True)
                shutil.copytree(room, package / room, ignore=shutil.ignore_patterns("__pycache__"))
            for file in FILES:
                (package / file).parent.mkdir(exist_ok=True)
                shutil.copy(file, package / file)


# Links of the page on PyPI, which has no other files
readme = re.sub(r"\]\((?!https?://|#)", f"]({REPOSITORY}/blob/main/", Path("README.md").read_text(encoding="utf-8"))

setup(
    name="clip-moe",
    version="0.1.0",
    description="Turns any dense CLIP into a sparse Mixture-of-Experts CLIP",
    long_description=readme,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    url=REPOSITORY,
    project_urls={"Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md", "Issues": f"{REPOSITORY}/issues"},
    keywords=["CLIP", "mixture of experts", "upcycling", "transformers"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
    ],
    python_requires=">=3.11",
    packages=["modeling_clip_moe", "clip_moe"],
    package_dir={"": "."},
    cmdclass={"build_py": Wheel},
    entry_points={"console_scripts": ["clip-moe = clip_moe:main"]},
    install_requires=[
        "huggingface_hub>=1.5",
        "safetensors>=0.8",
        "torch>=2.11",
        "transformers>=5.17",
    ],
    extras_require={
        "training": training,
        "sentence": sentence,
        "icons": icons,
        "test": test,
        "integrations": integrations,
        "app": app,
    },
)
