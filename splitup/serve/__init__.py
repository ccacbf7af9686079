"""``splitup serve``: the market behind the HTTP interface that existing clients speak."""
