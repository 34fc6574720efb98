package gateway

import (
	"context"
	"crypto/x509"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
)

// Style says how a provider wants its key and which variables point a client at
// it.
type Style string

// The styles. StyleOpenAI sends "Authorization: Bearer KEY", StyleAnthropic
// "X-Api-Key: KEY".
const (
	StyleOpenAI    Style = "openai"
	StyleAnthropic Style = "anthropic"
)

// Placeholder stands in a run's environment where a client insists on a key. It
// is no credential: the gateway strips whatever a run sends and adds the real
// one.
const Placeholder = "placeholder-the-gateway-adds-the-key"

// The defaults of [Config].
const (
	// DefaultMaxBody is well above the largest request a coding agent sends
	// (whole context windows with images; a provider's own limit is 32 MB).
	DefaultMaxBody = 32 << 20
	// DefaultConcurrent leaves room for an agent with a dozen sub-agents.
	DefaultConcurrent = 16
	// DefaultIdle is above the longest silence of a model that thinks before it
	// streams; the vendor SDKs give up after ten minutes themselves.
	DefaultIdle = 10 * time.Minute
	// DefaultReport is how far the ledger's usage may lag behind.
	DefaultReport = 5 * time.Second
)

// connectionsPerCall bounds the open connections of a run as a multiple of its
// concurrent calls: clients keep a few idle ones.
const connectionsPerCall = 4

// Provider is one model provider an operator has configured.
type Provider struct {
	// BaseURL is the only place this provider's route leads to, such as
	// https://api.openai.com/v1. https, unless the operator wrote http.
	BaseURL string
	// Key is the real credential. Empty adds none (a local model server).
	Key string
	// Style is how the key is sent; empty is guessed from nothing and refused.
	Style Style
}

// Usage receives what went over a run's routes. The ledger is one.
type Usage interface {
	AddRunUsage(ctx context.Context, run, provider string, requests, up, down int64) error
}

// Listen opens a listener inside the network namespace that a path names.
type Listen func(netns, network, addr string) (net.Listener, error)

// Config is what a gateway is made from. Zero values are the defaults above.
type Config struct {
	Providers map[string]Provider
	// Usage is told the counts; nil counts for nobody.
	Usage Usage
	// Listen opens the listeners; nil is netns.Listen.
	Listen Listen
	// MaxBody is the largest request body, in bytes.
	MaxBody int64
	// Concurrent is how many calls one run may have in flight.
	Concurrent int
	// Idle ends a call on which no byte has moved in either direction for so long.
	Idle time.Duration
	// Report is how often usage is handed to Usage while a call streams; the begin
	// and the end of a call are reported at once.
	Report time.Duration
	// RootCAs verifies providers; nil is the system's.
	RootCAs *x509.CertPool
	// Logger gets no secret and no body; nil discards.
	Logger *slog.Logger
}

// provider is a checked [Provider].
type provider struct {
	name  string
	base  *url.URL
	key   string
	style Style
}

func (c Config) withDefaults() Config {
	if c.MaxBody <= 0 {
		c.MaxBody = DefaultMaxBody
	}
	if c.Concurrent <= 0 {
		c.Concurrent = DefaultConcurrent
	}
	if c.Idle <= 0 {
		c.Idle = DefaultIdle
	}
	if c.Report <= 0 {
		c.Report = DefaultReport
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// checkProvider refuses a provider that could lead elsewhere or leak its key.
func checkProvider(name string, p Provider) (*provider, error) {
	if err := ident.CheckName("the name of a model provider", name); err != nil {
		return nil, err
	}
	refuse := func(format string, args ...any) error {
		return errdefs.New(errdefs.Invalid, "model provider %q: "+format, append([]any{name}, args...)...)
	}
	u, err := url.Parse(p.BaseURL)
	switch {
	case err != nil || u.Host == "" || u.Opaque != "":
		// Not the parser's text: it repeats the URL, which may hold a password.
		return nil, refuse("base_url is not an absolute URL")
	case u.Scheme != "https" && u.Scheme != "http":
		return nil, refuse("base_url must start with https:// (or http:// for a server you trust the way to)")
	case u.User != nil:
		return nil, refuse("base_url holds a user name or password; put the key into key_file")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, refuse("base_url holds a query or fragment, which would be lost")
	}
	if _, err := cleanPath(u.EscapedPath()); u.Path != "" && err != nil {
		return nil, refuse("base_url has a path that is not clean")
	}
	if p.Style != StyleOpenAI && p.Style != StyleAnthropic {
		return nil, refuse("style %q is unknown: use openai or anthropic", p.Style)
	}
	if strings.ContainsFunc(p.Key, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return nil, refuse("the key holds a space, a line break or a character outside ASCII; check the end of the key file")
	}
	if p.Key != "" && strings.Trim(p.Key, "*") == "" {
		return nil, refuse("the key is made of asterisks only, which stand for a key")
	}
	u.Path = strings.TrimRight(u.Path, "/")
	u.RawPath = strings.TrimRight(u.RawPath, "/")
	return &provider{name: name, base: u, key: p.Key, style: p.Style}, nil
}
