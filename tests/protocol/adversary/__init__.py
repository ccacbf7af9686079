"""An adversary that invents: one party of a market deviates from the protocol at random.

``mutations`` changes any field of any message, ``deviations`` decides what a party changes. In
``world`` members, the chain (``market``), client and executors (``parties``, ``tensors``) and
validators (``reports``) bring an execution from its request to its end. ``promises`` says what must
hold then. ``search`` runs and replays seeds.
"""
