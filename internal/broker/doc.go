// Package broker owns runs, processes and fences: it authorises, records, and
// follows every process until it is proven gone or fenced.
//
// # One process, one owner
//
// Every live or fenced process has one goroutine, its owner. Only the owner
// changes the process's record. It waits for news (a report of the host, an
// answer to a request of its own, a wish to close), asks process.Step what they
// mean, saves the new record with everything that belongs to it in one commit,
// publishes it, and only then acts. If the save fails the owner stops without
// acting; callers get unavailable, and a new owner begins from the ledger.
//
//	callers ──wishes──▶ owner ──save──▶ ledger
//	                    ▲   │ after the save
//	          reports   │   └──▶ lanes: start, ask, close (one request each) ──▶ host
//	target ─────────────┘◀── answers ──┘
//
// Every target has one goroutine that keeps the connection to its host program:
// it reaches it (driver), checks who it is, compares what it keeps with the
// ledger, and hands every change it reports to the process's owner.
//
// # Order that keeps the promises
//
//   - open: validate, one commit (P1), tell the host, one commit, answer.
//   - close: refuse new input, one commit, tell the host, proof and receipt in
//     one commit, answer (P4).
//   - finish: state finishing, gateway rights revoked (P8), processes closed,
//     state finished.
package broker
