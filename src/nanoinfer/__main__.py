"""Entry for `python -m nanoinfer`."""

from nanoinfer.cli.app import main

if __name__ == "__main__":
    main()
