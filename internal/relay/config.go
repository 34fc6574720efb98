package relay

import (
	"encoding/json"
	"log/slog"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// Profile says who shares the network a hub listens on.
type Profile string

// The profiles.
const (
	// Dedicated: one installation's own network. An empty token is allowed and
	// means that nobody is asked for one.
	Dedicated Profile = "dedicated"
	// Shared: several installations share it. The token must be strong.
	Shared Profile = "shared"
)

// DefaultPrefix begins the error codes of a hub that names no prefix.
const DefaultPrefix = "relay"

// HubConfig configures a [Hub]. It is not changed after [NewHub].
type HubConfig struct {
	// Token is what a daemon must say in its hello. In the shared profile at least
	// 32 characters, 12 of them different, no space around it.
	Token string
	// Profile is Dedicated when empty.
	Profile Profile
	// StateDir keeps markers, fences and the audit log. It is made 0700 if it is
	// missing and locked to this hub. Empty: fences live as long as the hub.
	StateDir string
	// SpillDir is where events that no one reads go when memory is used up, in
	// files without a name. Empty: StateDir, or /var/tmp without one.
	SpillDir string
	// Prefix begins the error codes: DefaultPrefix when empty.
	Prefix string
	// Limits: zero fields are the protocol's defaults.
	Limits relaywire.Limits
	// Compression lets daemons negotiate permessage-deflate without context
	// takeover. Off, it is declined: it costs more time than loopback saves.
	Compression bool
	// Logger: nil discards. Tokens and payloads are never logged.
	Logger *slog.Logger
}

// JobRequest is one job for one daemon.
type JobRequest struct {
	DaemonID string
	// Payload is a JSON object, passed on as it is.
	Payload json.RawMessage
	// Timeout bounds the job from its dispatch: Limits.RunTimeout when zero, never
	// less than 10 ms.
	Timeout time.Duration
	// Tools answers the tool calls of this job, until it is settled. nil: none.
	Tools Tools
	// Token, if not empty, must be the hub's own: a caller that was configured
	// with another one never reaches a daemon that authenticated with this one.
	Token string
}

// DaemonInfo is one connected daemon.
type DaemonInfo struct {
	ID          string          `json:"daemon_id"`
	Incarnation uint64          `json:"incarnation"` // grows with each connection to this hub
	Remote      string          `json:"remote"`
	Metadata    json.RawMessage `json:"metadata,omitempty"`
	ConnectedAt time.Time       `json:"connected_at"`
	LastSeenAt  time.Time       `json:"last_seen_at"`
	Jobs        []string        `json:"jobs"` // active ones, sorted
	Fenced      bool            `json:"fenced"`
}

// JobInfo is one job that is not settled.
type JobInfo struct {
	ID          string    `json:"job_id"`
	DaemonID    string    `json:"daemon_id"`
	Incarnation uint64    `json:"incarnation"`
	State       string    `json:"state"` // starting, running, cancelling, settling
	StartedAt   time.Time `json:"started_at"`
	Deadline    time.Time `json:"deadline"`
	Events      int64     `json:"events"`       // received
	QueuedBytes int64     `json:"queued_bytes"` // not read yet, in memory
	SpillBytes  int64     `json:"spill_bytes"`  // not read yet, on disk
	Waiting     bool      `json:"waiting"`      // the daemon is not read until the consumer reads
}

// Outcome is how a job ended.
type Outcome struct {
	// Acknowledged: the daemon said run.finished, so its processes are gone.
	Acknowledged bool `json:"acknowledged"`
	// Code is the relay code with prefix of why it ended, "" when it finished by
	// itself.
	Code string `json:"code,omitempty"`
	// Cause is why, for people.
	Cause string `json:"cause,omitempty"`
	// Fence stands when the end could not be confirmed.
	Fence *Fence `json:"fence,omitempty"`
}

// Fence is the evidence that something may still be running at a daemon's machine.
type Fence struct {
	DaemonID    string          `json:"daemon_id"` // "" when a damaged marker no longer says it
	Key         string          `json:"key"`       // SHA-256 of the id, in hex; names the marker
	Since       time.Time       `json:"since"`
	Code        string          `json:"code"`  // unacknowledged, disconnected, hub_died, damaged
	Cause       string          `json:"cause"` // for people
	Jobs        []string        `json:"jobs"`  // that were not confirmed
	Remote      string          `json:"remote,omitempty"`
	Incarnation uint64          `json:"incarnation,omitempty"`
	Metadata    json.RawMessage `json:"metadata,omitempty"`
	// Late are run.finished frames that came after the fence. They are evidence for
	// the operator and lift nothing.
	Late []LateFinish `json:"late,omitempty"`
}

// LateFinish is an acknowledgement that came too late to count.
type LateFinish struct {
	JobID string    `json:"job_id"`
	At    time.Time `json:"at"`
}

// checkToken holds a token to the rules of the profile.
func checkToken(profile Profile, prefix, token string) error {
	if profile != Shared {
		return nil
	}
	distinct := map[rune]bool{}
	for _, r := range token {
		distinct[r] = true
	}
	switch {
	case strings.TrimSpace(token) != token:
		return relaywire.Errorf(prefix, relaywire.CodeTokenRequired, "the daemon token has space around it").
			WithNext("remove it on both sides")
	case utf8.RuneCountInString(token) < 32 || len(distinct) < 12:
		return relaywire.Errorf(prefix, relaywire.CodeTokenRequired,
			"the daemon token has %d characters, %d of them different: the shared profile needs 32 and 12",
			utf8.RuneCountInString(token), len(distinct)).WithNext("make one with: openssl rand -base64 32")
	}
	return nil
}

func (c HubConfig) check() (HubConfig, error) {
	if c.Profile == "" {
		c.Profile = Dedicated
	}
	if c.Profile != Dedicated && c.Profile != Shared {
		return c, errdefs.New(errdefs.Invalid, "the relay's profile %q is not known: use dedicated or shared", c.Profile)
	}
	if c.Prefix == "" {
		c.Prefix = DefaultPrefix
	}
	for _, r := range c.Prefix {
		if r != '_' && r != '-' && (r < 'a' || r > 'z') && (r < '0' || r > '9') {
			return c, errdefs.New(errdefs.Invalid, "the relay's prefix %q may hold a-z, 0-9, _ and - only", c.Prefix)
		}
	}
	if err := c.Limits.Check(); err != nil {
		return c, err
	}
	c.Limits = c.Limits.WithDefaults()
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, checkToken(c.Profile, c.Prefix, c.Token)
}
