"""Run a recipe.

accelerate launch training/upcycle.py --config training/recipes/demo.yaml
python -m training.upcycle --config training/recipes/clip_up.yaml --output-dir runs/l14 --clip_up.learning_rate 1e-5
"""

if __name__ == "__main__":
    import sys

    from clip_moe import with_own_classes  # before torch, whose threads it tells not to spin
    from training.commands import run

    sys.argv[1:] = with_own_classes(sys.argv[1:])
    run.main()
