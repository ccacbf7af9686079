"""The modes of ``python -m bench``: one module each, with a function ``run(quick)``."""
