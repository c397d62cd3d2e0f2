"""SGLang's P/D transfer backend ``kvconnect`` and its linker: the only folder that knows a type of SGLang.

`registration` is what SGLang loads, `conn` has the classes that it calls for transfers, `room_ledger` what
they share; `linker` is the class that it calls to keep KV, `page_tiers` what that drives.
"""
