"""SGLang's P/D transfer backend ``kvconnect``: the only folder that knows a type of SGLang.

`registration` is what SGLang loads, `conn` has the classes that it calls, `room_ledger` what they share.
"""
