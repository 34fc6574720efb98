// Package process holds the life of one process as two pure machines.
//
// [Step] is the ledger's view: what the server knows, must save and must do.
//
//	requested ──▶ starting ──▶ running ──▶ (exited) ──▶ closed
//	    │            │ │          │                       ▲
//	    │            │ │          ├──▶ closing ───────────┤
//	    │            │ │          │       ▲ │             │
//	    │            │ └──▶ unknown ──────┘ └──▶ fenced ──┘ (proof, or an operator's act)
//	    │            └──▶ closing ──▶ never_started  (a refusal, or a close that overtook the start)
//	    └──▶ never_started  (close came first: a tombstone that blocks a late start)
//
// The end of a process and the proof that its tree is gone arrive together, so
// exited is passed through within one step and never saved: the receipt is
// committed with closed. An end without proof raises a fence.
//
// Nothing is inferred (P3, P4). closed follows only from proof or from an
// operator's act; a broken connection changes running into nothing else; a start
// whose answer was lost is unknown until the host is asked. A host that does not
// know the process is told again, by the same id, if it never said that it keeps
// it; if it did say so, its record is lost, and a fence stands unless its machine
// was restarted since.
//
// Once a close was asked no start is sent again. The host is told to close even
// what it does not know: it then records that the id must never start, which is
// proof against a start that is still on its way. A start that the host refuses
// is closed in the same way, because a copy of it may still arrive.
//
// [Recover] says what to do about a record found in the ledger by a new owner.
// Every effect may be carried out any number of times.
//
// [KeepStep] is the keeper's view: what the shim beside the child does.
//
//	accepted ──▶ starting ──▶ running ──▶ stopping(signalled ▶ killed) ──▶ ended
//
// Neither has I/O, a clock, or randomness: time comes as an argument, effects go
// back as values. The owner saves the new state before it carries out an effect;
// if the save fails it stops and carries out none.
package process
