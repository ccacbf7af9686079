from tests.sandbox.target import target as target
