// Package process holds the life of one process as two pure machines.
//
// [Step] is the ledger's view: what the server knows, must save and must do.
//
//	requested ──▶ starting ──▶ running ──▶ exited ──▶ closed
//	    │             │           │                     ▲
//	    │             │           └──▶ closing ─────────┤
//	    │             └──▶ unknown ─────────────────────┤ (proven later)
//	    │                     └────▶ fenced ────────────┘ (proof, or an operator's act)
//	    └──▶ never_started  (close came first: a tombstone that blocks a late start)
//
// [KeepStep] is the keeper's view: what the shim beside the child does.
//
//	accepted ──▶ starting ──▶ running ──▶ stopping(signalled ▶ killed) ──▶ ended
//
// Neither has I/O, a clock, or randomness: time comes as an argument, effects go
// back as values. The owner saves the new state before it carries out an effect;
// if the save fails it stops and carries out none.
package process
