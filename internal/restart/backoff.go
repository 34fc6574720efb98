package restart

import "time"

// The numbers of the published SDK 0.6.3 and 0.7.
const (
	// FirstDelay is the first wait after a failure, before jitter.
	FirstDelay = time.Second
	// MaxDelay is the longest wait, before jitter.
	MaxDelay = 60 * time.Second
	// Lasted is how long an attempt must have lasted, start-up included, for the
	// wait to begin anew.
	Lasted = 60 * time.Second
	// Ready is how long a launch may take until its worker is ready.
	Ready = 30 * time.Second
	// Stable is how long a probe must run for its circuit to close.
	Stable = 60 * time.Second
)

// Backoff is the wait between attempts of one supervisor: 1, 2, 4 … 60 seconds,
// each times 0.8 to 1.2. The zero Backoff is the one of a new supervisor.
type Backoff struct {
	delay time.Duration // zero is FirstDelay
}

// Next returns how long to wait before the next attempt, 0.8 s to 72 s, given
// how long the one that just ended had lasted and a random number in [0, 1), and
// the backoff for the attempt after it. A jitter outside is taken as the nearest.
func (b Backoff) Next(lasted time.Duration, jitter float64) (wait time.Duration, next Backoff) {
	d := b.Delay()
	if lasted >= Lasted {
		d = FirstDelay
	}
	jitter = min(max(jitter, 0), 1)
	return time.Duration(float64(d) * (0.8 + 0.4*jitter)), Backoff{delay: min(2*d, MaxDelay)}
}

// Delay returns the wait that comes next, before jitter and before anything is
// known of how long the attempt will last.
func (b Backoff) Delay() time.Duration {
	if b.delay <= 0 {
		return FirstDelay
	}
	return b.delay
}
