package relaywire

import (
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// EnvelopeBytes is what a message may have beside its event or payload: the
// frame's own words, ids and metadata.
const EnvelopeBytes = 64 << 10

// MaxIDBytes bounds a job id and a request id as they come from the other side.
// Ours have 22 and 16.
const MaxIDBytes = 256

// Limits are the caps and times of one hub or client. A zero field means the
// default named beside it; a negative one is refused by [Limits.Check], save
// where it says otherwise.
type Limits struct {
	Jobs     int // jobs at once on a hub: 128
	Daemons  int // identities connected or fenced: 128
	IDRunes  int // characters of a daemon id: 128
	MCPCalls int // tool calls of one job at once, more wait or are refused: 16

	MessageBytes int64 // one event or payload: 16 MiB; the envelope has EnvelopeBytes more
	QueueBytes   int64 // unread events of one job kept in memory: 1 MiB
	SpillBytes   int64 // unread events of one job kept on disk beyond that: 1 GiB; negative: none
	SpillTotal   int64 // the same of all jobs of a hub: 8 GiB
	// SocketBytes bounds what waits in the kernel on a connection: an acknowledgement
	// stands behind it. A hub sets it for receiving, a client a quarter of it for
	// sending. It also bounds the speed of one connection, to SocketBytes per round
	// trip: 256 KiB; negative: the kernel decides.
	SocketBytes int
	OutboxBytes int64 // frames to one daemon that wait to be sent: 32 MiB, or one frame

	HelloTimeout   time.Duration // from the connection to daemon.hello: 10 s
	ReadyTimeout   time.Duration // from daemon.hello to daemon.ready: 10 s
	CancelTimeout  time.Duration // from run.cancel to run.finished: 10 s
	ConnectTimeout time.Duration // how long a run waits for its daemon: 30 s
	ReconnectDelay time.Duration // between two connections of a client: 5 s
	RunTimeout     time.Duration // a job that names none: 30 min
	MCPTimeout     time.Duration // one tool call: 60 s
	PingInterval   time.Duration // a daemon that was silent this long is asked: 20 s; negative: never
	PongTimeout    time.Duration // and this long for its answer: 20 s
	StallTimeout   time.Duration // a write, or a full queue of the only job of a daemon, waits: 30 s
}

// The floors of times that a caller may choose per job or per wait.
const (
	MinRunTimeout = 10 * time.Millisecond
	MinWait       = 100 * time.Millisecond
)

// WithDefaults returns the limits with each zero field at its default.
func (l Limits) WithDefaults() Limits {
	number(&l.Jobs, 128)
	number(&l.Daemons, 128)
	number(&l.IDRunes, 128)
	number(&l.MCPCalls, 16)
	number(&l.MessageBytes, 16<<20)
	number(&l.QueueBytes, 1<<20)
	number(&l.SpillBytes, 1<<30)
	number(&l.SpillTotal, 8<<30)
	number(&l.SocketBytes, 256<<10)
	number(&l.OutboxBytes, 32<<20)
	number(&l.HelloTimeout, 10*time.Second)
	number(&l.ReadyTimeout, 10*time.Second)
	number(&l.CancelTimeout, 10*time.Second)
	number(&l.ConnectTimeout, 30*time.Second)
	number(&l.ReconnectDelay, 5*time.Second)
	number(&l.RunTimeout, 30*time.Minute)
	number(&l.MCPTimeout, 60*time.Second)
	number(&l.PingInterval, 20*time.Second)
	number(&l.PongTimeout, 20*time.Second)
	number(&l.StallTimeout, 30*time.Second)
	return l
}

func number[T int | int64 | time.Duration](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// ReadLimit is the largest message these limits let in, in bytes.
func (l Limits) ReadLimit() int64 { return l.MessageBytes + EnvelopeBytes }

// Check refuses limits that no hub or client can keep, as Invalid.
func (l Limits) Check() error {
	l = l.WithDefaults()
	for _, c := range []struct {
		name string
		v    int64
		max  int64
	}{
		{"jobs", int64(l.Jobs), 1 << 20},
		{"daemons", int64(l.Daemons), 1 << 20},
		{"daemon id characters", int64(l.IDRunes), 1 << 10},
		{"tool calls", int64(l.MCPCalls), 1 << 16},
		{"message bytes", l.MessageBytes, 1 << 30},
		{"queue bytes", l.QueueBytes, 1 << 32},
		{"outbox bytes", l.OutboxBytes, 1 << 32},
	} {
		if c.v < 1 || c.v > c.max {
			return errdefs.New(errdefs.Invalid, "the relay's limit of %s is %d: it must be between 1 and %d", c.name, c.v, c.max)
		}
	}
	for _, c := range []struct {
		name string
		v    time.Duration
	}{
		{"hello", l.HelloTimeout}, {"ready", l.ReadyTimeout}, {"cancel", l.CancelTimeout},
		{"connect", l.ConnectTimeout}, {"run", l.RunTimeout}, {"tool call", l.MCPTimeout},
		{"pong", l.PongTimeout}, {"stall", l.StallTimeout}, {"reconnect", l.ReconnectDelay},
	} {
		if c.v < time.Millisecond || c.v > 30*24*time.Hour {
			return errdefs.New(errdefs.Invalid, "the relay's %s time is %s: it must be between 1ms and 30 days", c.name, c.v)
		}
	}
	return nil
}
