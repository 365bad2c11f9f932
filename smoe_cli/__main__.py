"""`python -m smoe_cli` is `smoe`."""

from smoe_cli.app import main

main()
