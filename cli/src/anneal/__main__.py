"""Run the command as `python -m anneal`."""

from anneal.app import app

if __name__ == "__main__":
    app(prog_name="anneal")
