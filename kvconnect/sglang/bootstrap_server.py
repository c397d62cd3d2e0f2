"""P's bootstrap server: SGLang's own, which also hands out the handles that vouch for ranks' addresses."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvconnect.sglang.prefill_directory import KEY

_RANK = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


class KVConnectBootstrapServer(CommonKVBootstrapServer):
    """In P's HTTP process. Decode servers of other backends refuse its answers, which have a field more."""

    def __init__(self, host: str, port: int) -> None:
        self._handles: dict[tuple[str, ...], str] = {}
        super().__init__(host, port)

    async def _handle_route_put(self, request: Any) -> Any:
        answer, given = await super()._handle_route_put(request), await request.json()
        group = "attn_dp_rank" if given["system_dp_size"] == 1 else "system_dp_rank"
        names = (group, "attn_cp_rank", "attn_tp_rank", "pp_rank")
        self._handles[tuple(str(given[name]) for name in names)] = str(given.get(KEY, ""))
        return answer

    async def _handle_route_get(self, request: Any) -> Any:
        answer = await super()._handle_route_get(request)
        if answer.status == 200:
            rank = tuple(request.query[name] for name in _RANK)
            found = {**json.loads(answer.body), KEY: self._handles.get(rank, "")}
            answer.body = json.dumps(found).encode()
        return answer
