"""An adversary that invents: one party of a market deviates from the protocol at random.

``mutations`` changes any field of any message, ``deviations`` decides what a party changes,
``market`` is the contract, ``world`` runs an execution from its request to its end, ``promises``
says what must hold. ``search`` runs and replays seeds.
"""
