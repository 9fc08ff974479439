"""A request's rows in the plan of a step: the tokens it feeds next, as far as the host knows."""

from collections.abc import Sequence

from actors.messages import DecodeRow, PrefillRow
from actors.request import Request


def decode_row(request: Request, max_drafts: int) -> DecodeRow:
    """Verify up to `max_drafts` drafts behind the bonus token, fewer near the request's end or
    where its grammar forbids one."""
    in_flight = request.num_ahead > 0
    # The unread step emits at least one token, maybe no more: then this step needs the drafts.
    most_left = request.num_left - in_flight
    num_drafts = min(max_drafts, request.most_drafts)
    masks: Sequence[bytes] = ()
    if request.grammar is not None:
        num_drafts, masks = request.grammar.masks(request.drafts[:num_drafts])
    bonus = request.next_position + num_drafts + 1
    return DecodeRow(
        slot=request.held_slot,
        position=request.next_position,
        num_drafts=num_drafts,
        propose=_is_proposing(request, max_drafts, bonus, most_left),
        prev_in_flight=in_flight,
        masks=tuple(masks),
    )


def prefill_rows(request: Request, count: int, width: int, max_drafts: int) -> list[PrefillRow]:
    """Feed the next `count` known tokens, in rows of up to `width`."""
    first = request.next_position
    end = first + count
    rows = []
    for start in range(first, end, width):
        stop = min(start + width, end)
        last = stop == request.prefill_len
        behind = request.known_tokens(stop, min(stop + 1, request.prefill_len))
        rows.append(
            PrefillRow(
                slot=request.held_slot,
                start=start,
                token_ids=request.known_tokens(start, stop),
                fresh=start == request.first_position,
                last=last,
                propose=_is_proposing(request, max_drafts, stop, request.num_left),
                next_token_id=behind[0] if behind else -1,
                masks=tuple(request.grammar.masks(())[1]) if request.grammar and last else (),
            )
        )
    return rows


def _is_proposing(request: Request, max_drafts: int, bonus: int, most_left: int) -> bool:
    """Drafts are of use only where another step may still verify one, and are made only where a
    whole block is within the drafter's positions.

    `bonus` is where the row's last token may stand at the most, behind which the block is drafted;
    `most_left` how many tokens the request may have left before this step, at the most.
    """
    if bonus >= request.draft_end:
        return False
    return min(max_drafts, request.draft_limit) > 0 and most_left > 2
