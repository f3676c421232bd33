"""``python -m launcher FD``: started by `launcher.offline` only."""

import sys

from launcher.offline import Order, main

if __name__ == "__main__":
    with open(int(sys.argv[1]), "rb") as file:
        order = Order.model_validate_json(file.read())
    sys.exit(main(order))
