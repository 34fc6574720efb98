package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Gateway serves the model routes of every active run. Its methods may be called
// from any goroutine.
type Gateway struct {
	cfg       Config
	providers map[string]*provider
	transport *http.Transport

	mu     sync.Mutex
	runs   map[string]*run
	closed bool
}

// Grant is what one run may reach.
type Grant struct {
	// Run is the run's id.
	Run string
	// NetNS is the path of the network namespace of the run's box.
	NetNS string
	// Providers are the names of the granted providers, at least one.
	Providers []string
	// Ports are the ports of an earlier Open of this run, by provider: one of
	// them is used again if it is free, so that a restart of the server does not
	// change what the run's processes were told.
	Ports map[string]int
}

// Route is the way to one provider from inside the box, for as long as the run
// is open.
type Route struct {
	Provider string
	Port     int
	BaseURL  string
	// Env points the usual clients of the provider's style at it.
	Env map[string]string
}

// New checks the providers and makes a gateway that serves nobody yet.
func New(cfg Config) (*Gateway, error) {
	cfg = cfg.withDefaults()
	if cfg.Listen == nil {
		cfg.Listen = listenIn
	}
	g := &Gateway{cfg: cfg, providers: map[string]*provider{}, runs: map[string]*run{}}
	for _, name := range slices.Sorted(maps.Keys(cfg.Providers)) {
		p, err := checkProvider(name, cfg.Providers[name])
		if err != nil {
			return nil, err
		}
		g.providers[name] = p
	}
	g.transport = &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            (&net.Dialer{Timeout: 30 * time.Second}).DialContext,
		TLSClientConfig:        &tls.Config{RootCAs: cfg.RootCAs, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    15 * time.Second,
		ForceAttemptHTTP2:      true,
		DisableCompression:     true, // what the provider sends is what the run gets
		MaxIdleConnsPerHost:    cfg.Concurrent,
		IdleConnTimeout:        90 * time.Second,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: 256 << 10,
	}
	return g, nil
}

// Providers lists the configured providers by name.
func (g *Gateway) Providers() []string { return slices.Sorted(maps.Keys(g.providers)) }

// Check refuses names that are no configured provider with an error that lists
// those that are: not_found. An empty list passes.
func (g *Gateway) Check(names []string) error {
	for _, n := range names {
		if g.providers[n] == nil {
			return errdefs.New(errdefs.NotFound, "there is no model provider %q here", n).
				WithNext("%s", listed("configured", g.Providers()))
		}
	}
	return nil
}

func listed(what string, names []string) string {
	if len(names) == 0 {
		return "none is " + what
	}
	return what + ": " + strings.Join(names, ", ")
}

// Open begins to serve a run and returns its routes in the order of the grant.
// Opening an open run again with the same providers returns the same routes;
// with others it is a conflict. Unknown providers are not_found, and then nothing
// was opened (P11).
func (g *Gateway) Open(ctx context.Context, grant Grant) ([]Route, error) {
	if len(grant.Providers) == 0 {
		return nil, errdefs.New(errdefs.Invalid, "the run was granted no model provider")
	}
	if err := g.Check(grant.Providers); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "opening the model routes was given up")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, errdefs.New(errdefs.Unavailable, "the gateway is stopping").WithNext("try again when the server is up")
	}
	if r, ok := g.runs[grant.Run]; ok {
		if !slices.Equal(slices.Sorted(slices.Values(grant.Providers)), slices.Sorted(maps.Keys(r.routes))) {
			return nil, errdefs.New(errdefs.Conflict, "the model routes of this run are open already, for other providers")
		}
		return r.list(grant.Providers), nil
	}
	l, err := g.listen(grant)
	if err != nil {
		return nil, err
	}
	routes := map[string]*route{}
	for _, name := range grant.Providers {
		routes[name] = &route{provider: g.providers[name]}
	}
	r := newRun(g, grant.Run, l, routes)
	g.runs[grant.Run] = r
	return r.list(grant.Providers), nil
}

// listen tries the asked-for ports, then any.
func (g *Gateway) listen(grant Grant) (net.Listener, error) {
	var ports []int
	for _, name := range grant.Providers {
		if p := grant.Ports[name]; p > 0 && p < 1<<16 && !slices.Contains(ports, p) {
			ports = append(ports, p)
		}
	}
	var errs []error
	for _, p := range append(ports, 0) {
		l, err := g.cfg.Listen(grant.NetNS, "tcp4", fmt.Sprintf("127.0.0.1:%d", p))
		if err == nil {
			return l, nil
		}
		errs = append(errs, err)
	}
	return nil, errdefs.Wrap(errors.Join(errs...), errdefs.Unavailable, "the gateway could not listen inside the box").
		WithNext("see the server's log; `stockade doctor` checks network namespaces")
}

// CloseRun ends a run's rights. When it returns nil the listener is gone, every
// call that was in flight has ended, and the last usage was reported (P8).
// Closing a run that is not open does nothing. If ctx ends first the error is
// indeterminate; the rights are gone then too, but a call may still be unwinding.
func (g *Gateway) CloseRun(ctx context.Context, id string) error {
	g.mu.Lock()
	r := g.runs[id]
	g.mu.Unlock()
	if r == nil {
		return nil
	}
	r.stop()
	select {
	case <-r.done:
	case <-ctx.Done():
		return errdefs.Wrap(ctx.Err(), errdefs.Indeterminate, "a call to a model provider had not ended when waiting for it was given up")
	}
	g.mu.Lock()
	if g.runs[id] == r {
		delete(g.runs, id)
	}
	g.mu.Unlock()
	return nil
}

// Close closes every run and the idle connections to the providers. Nothing can
// be opened afterwards.
func (g *Gateway) Close(ctx context.Context) error {
	g.mu.Lock()
	g.closed = true
	ids := slices.Sorted(maps.Keys(g.runs))
	for _, r := range g.runs {
		r.stop()
	}
	g.mu.Unlock()
	var errs []error
	for _, id := range ids {
		errs = append(errs, g.CloseRun(ctx, id))
	}
	g.transport.CloseIdleConnections()
	return errors.Join(errs...)
}

// Env merges the environments of routes. Where two providers of one style are
// granted, the one that comes first wins.
func (g *Gateway) Env(routes []Route) map[string]string {
	env := map[string]string{}
	for _, r := range slices.Backward(routes) {
		maps.Copy(env, r.Env)
	}
	return env
}

// styleEnv is what a client of the style reads.
func styleEnv(s Style, baseURL string) map[string]string {
	switch s {
	case StyleAnthropic:
		return map[string]string{"ANTHROPIC_BASE_URL": baseURL, "ANTHROPIC_API_KEY": Placeholder}
	default:
		return map[string]string{"OPENAI_BASE_URL": baseURL, "OPENAI_API_KEY": Placeholder}
	}
}

// logger returns the logger for one run.
func (g *Gateway) logger(run string) *slog.Logger { return g.cfg.Logger.With("run", run) }
