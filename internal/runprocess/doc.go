// Package runprocess lets the runners of granted plugins start processes in the
// broker's boxes, over the five actions that end in _run_process.
//
// A [Keeper] begins a run in the broker's ledger when LangBot runs a runner of a
// granted installation, and ends it with the stream, whatever way that ends. The
// run is begun beside the stream: a runner that uses no process does not wait for
// it. A worker's request is answered only for a run that is active for exactly
// the installation its connection or slot acts under; any other run, and every
// run that has ended, looks missing. Handles, offsets, cursors and request ids are
// the broker's, and so are their promises: it is asked with the run's own token,
// for which nothing but the run exists.
//
// # The end of a run
//
// [Run.End] takes the run out of the table first: from then on no request finds
// it. Requests under way are cancelled and have returned before the broker is told
// to finish the run; it revokes the token, closes what still runs, and answers with
// a proof or a fence. A runtime that is killed leaves a run that the broker ends
// when its time is over (see [TTL]).
//
// # Goroutines
//
//	begin     one per run at its start, and one more per request that finds that
//	          the last begin failed; bounded by BeginWithin; joined by the finish
//	watch     one per active run: ends it when its worker has gone or its deadline is over
//	finish    one per ended run, bounded by FinishWithin
//
// [Keeper.Close] ends every run and joins them all. Keeper.mu is a leaf: nothing
// is called out while it is held.
package runprocess
