"""Run a recipe.

accelerate launch training/upcycle.py --config training/recipes/demo.yaml
python -m clip_moe.training.upcycle --config my_recipe.yaml --output_dir runs/l14 --clip_up.learning_rate 1e-5
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    # In place of this script's folder, whose files are no modules by themselves: a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from clip_moe import with_own_classes  # before torch, whose threads it tells not to spin
    from clip_moe.training.commands import run

    sys.argv[1:] = with_own_classes(sys.argv[1:])
    run.main()
