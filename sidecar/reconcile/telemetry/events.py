"""What happened lately on this replica: in memory, bounded, what happens again counted. No I/O.

The same reason and message about the same adapter are one event with a count, as in Kubernetes.
The one that happened longest ago makes room: of what is normal, while that is half of the log or more,
so that no flood of loads washes out a failure. An adapter that fails time and again, each time with other
words, takes no more than its share; nor does one kind of trouble of the replica itself.
"""

from __future__ import annotations

import datetime
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import AdapterKey, Event, Pointer, Record
from lora_fs.sidecar.registry.view.snapshot import Desired, touched

KEPT = 128
KEPT_OF_ONE = 16  # adapter, all its revisions together; of the replica itself: reason
MESSAGE_CHARACTERS = 512

LOGGED = frozenset({"NotAdopted", "VolumeUnavailable"})  # where they are found

logger = logging.getLogger(__name__)

Now = Callable[[], datetime.datetime]
_Identity = tuple[AdapterKey | None, str, str]
_Subject = tuple[str, str, str] | str  # an adapter, all its revisions; of the replica itself: a reason


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class EventLog:
    """Lives on the event loop. ``version`` is another one after each event."""

    def __init__(self, now: Now = utc_now) -> None:
        self._now = now
        self._events: dict[_Identity, Event] = {}  # the one that happened last is last
        self._of = Counter[_Subject]()  # how many
        self._normal = 0
        self.version = 0

    def tell(
        self, reason: str, message: str = "", key: AdapterKey | None = None, *, warning: bool = False
    ) -> None:
        """Note an event; of no key: of the replica itself."""
        at = self._now().isoformat(timespec="milliseconds")
        message = message[:MESSAGE_CHARACTERS]
        identity = (key, reason, message)
        before = self._events.pop(identity, None)
        if before is not None:
            noted = before.model_copy(update={"count": before.count + 1, "last_at": at})
        else:
            kind = "Warning" if warning else "Normal"
            noted = Event(type=kind, reason=reason, message=message, key=key, first_at=at, last_at=at)
            subject = _subject(identity)
            self._make_room(subject)
            self._of[subject] += 1
            self._normal += not warning
        self._events[identity] = noted
        self.version += 1

    def events(self) -> tuple[Event, ...]:
        """All there are, in the order in which each happened last."""
        return tuple(self._events.values())

    def _make_room(self, subject: _Subject) -> None:
        if self._of[subject] >= KEPT_OF_ONE:
            self._drop(next(one for one in self._events if _subject(one) == subject))
        elif len(self._events) >= KEPT:
            is_any = self._normal < KEPT // 2
            self._drop(next(one for one, noted in self._events.items() if is_any or noted.type == "Normal"))

    def _drop(self, identity: _Identity) -> None:
        self._normal -= self._events.pop(identity).type == "Normal"
        subject = _subject(identity)
        self._of[subject] -= 1
        if not self._of[subject]:
            del self._of[subject]


def _subject(identity: _Identity) -> _Subject:
    key, reason, _ = identity
    return reason if key is None else (key.namespace, key.model, key.name)


class News:
    """Notes in a log what is new since it last looked."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._seen: Desired | None = None
        self._troubles: frozenset[str] = frozenset()

    def written(self, desired: Desired) -> None:
        """What the volume says; what was there at the first look is no news."""
        if self._seen is not None:
            for key in touched(self._seen.records, desired.records):
                self._written(self._seen.records.get(key), desired.records.get(key))
            for name in touched(self._seen.pointers, desired.pointers):
                self._moved(self._seen.pointers.get(name), desired.pointers.get(name))
        self._seen = desired

    def troubles(self, conditions: Iterable[str]) -> None:
        """The replica's own, ``Kind: message``, as they come and as they end."""
        now = frozenset(conditions)
        for trouble in sorted(now - self._troubles):
            kind, _, message = trouble.partition(": ")
            self._log.tell(kind, message, warning=True)
            if kind not in LOGGED:
                logger.warning("%s", trouble, extra=event("condition.begins", condition=kind))
        ended = {kind.partition(": ")[0] for kind in self._troubles} - {k.partition(": ")[0] for k in now}
        for kind in sorted(ended):
            self._log.tell(kind, "it is over")
            logger.info("%s is over", kind, extra=event("condition.ends", condition=kind))
        self._troubles = now

    def _written(self, before: Record | None, after: Record | None) -> None:
        if after is None:
            return
        was, by = before is not None and before.present, f"by {after.writer}"
        if not after.present:
            if was:
                self._log.tell("Removed", f"unregistered {by}", after.key)
        elif not was:
            self._log.tell("Registered", by, after.key)
        elif before is not None and before.spec != after.spec:
            what = "its files" if before.spec.digest != after.spec.digest else "what is said of it"
            self._log.tell("Changed", f"{what}, {by}", after.key)

    def _moved(self, before: Pointer | None, after: Pointer | None) -> None:
        if before is None or after is None:
            return  # a new name: its registration is an event of its own
        revision, trial = after.revision or before.revision, after.canary or before.canary
        if revision is None:
            return
        key = AdapterKey(after.namespace, after.model, revision, after.name)
        by = f"by {after.writer}"
        if after.revision is None:
            self._log.tell("Withdrawn", f"the plain name serves nothing any more, {by}", key)
        elif after.revision != before.revision:
            served = before.revision or "nothing"
            self._log.tell("Promoted", f"the plain name serves it after {served}, {by}", key)
        elif after.canary != before.canary and trial is not None:
            share = (
                f"answers {trial.percent} % of the requests" if after.canary else "answers no share any more"
            )
            self._log.tell("CanaryChanged", f"{share}, {by}", key._replace(revision=trial.revision))
