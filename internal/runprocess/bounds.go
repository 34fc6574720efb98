package runprocess

import "time"

// Bounds of one call. They stand below the time-outs of the published SDK's calls
// (stockade-runner: 120 s to open, 60 s and the grace to close, 30 s and the wait
// for others), so that a runner hears why, not that it took too long.
const (
	MaxData = 1 << 20 // bytes of one read or write
	MaxWait = 20 * time.Second

	defaultRead  = 256 << 10
	openWithin   = 110 * time.Second
	closeWithin  = 55 * time.Second // and the grace
	otherWithin  = 25 * time.Second // and the wait
	defaultGrace = 5 * time.Second  // the broker's, where a close names none
	maxGrace     = 10 * time.Minute
)

// Bounds of what runs at the same time. A connection of the plugin protocol has 128
// lanes: with ConnCalls the last 32 are always free for everything else.
const (
	RunCalls  = 16   // calls of one run
	RunPolls  = 12   // of those, reads that wait
	ConnCalls = 96   // calls over one worker's connection, of all its slots
	MaxRuns   = 1024 // runs that are not finished
	begins    = 8    // runs that are begun at the same time
)

// Times of a run.
const (
	// BeginWithin bounds one attempt to begin a run: a box may have to be made.
	BeginWithin = 30 * time.Second
	// FinishWithin bounds the repeating of a finish that the broker does not answer;
	// after it the run's own time ends it.
	FinishWithin = 5 * time.Minute
	// TellWithin is how long the last result of a run that has started a process is
	// kept back from LangBot until its processes are proven gone.
	TellWithin = 15 * time.Second
	// tellLeast is that where the run's deadline is near or over.
	tellLeast = time.Second
	// tellMargin is how long before the deadline the last result is told in any case.
	tellMargin = 500 * time.Millisecond
	// EndGrace is the time between SIGTERM and SIGKILL for what a run leaves running.
	EndGrace = 2 * time.Second

	// overMargin is how long after its deadline a run is ended in any case: the worker's
	// own time-out comes first.
	overMargin = time.Second

	ttlMargin  = time.Minute
	ttlDefault = time.Hour
	ttlMost    = 24 * time.Hour
)

// TTL is the life of a run in the ledger, after which the broker ends it though
// nobody asked: a minute beyond the deadline, an hour without one, a day at most.
func TTL(deadline, now time.Time) time.Duration {
	if deadline.IsZero() {
		return ttlDefault
	}
	return min(max(deadline.Sub(now), 0)+ttlMargin, ttlMost)
}

// Patience is how long the last result of a run may be kept back: [TellWithin], and
// not beyond the run's deadline.
func Patience(deadline, now time.Time) time.Duration {
	if deadline.IsZero() {
		return TellWithin
	}
	return min(max(deadline.Sub(now)-tellMargin, tellLeast), TellWithin)
}
