"""`python -m clip_moe COMMAND`."""

from clip_moe import main

main()
