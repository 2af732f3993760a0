"""Run a recipe.

accelerate launch training/upcycle.py --config training/recipes/demo.yaml
python -m training.upcycle --config training/recipes/clip_up.yaml --output-dir runs/l14 --clip_up.learning_rate 1e-5
"""

if __name__ == "__main__":
    from training.commands import run

    run.main()
