// Package client is the Go client of a Stockade server.
//
// A [Client] has one typed method for every operation of the HTTP API, and
// [Process] makes the byte streams of a process convenient: an input writer that
// tracks its offset, an output reader that reconnects at its cursor, a socket for
// terminals. The package keeps the promises of the API through the loss of a
// connection and through the restart of the server: whatever is safe to repeat
// (by request id, offset or cursor) is repeated until it is answered, the context
// ends or Config.RetryFor has passed; nothing else is ever repeated.
//
// Every error carries a stable [Code]; see [CodeOf] and [Error].
package client

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// DefaultRetryFor is how long a call that is safe to repeat is repeated while
// the server does not answer. A restart of a server takes a few seconds.
const DefaultRetryFor = 30 * time.Second

// Config says which server to talk to, and as whom.
type Config struct {
	// URL is the server's base address, such as "http://127.0.0.1:7878". A path
	// in it is kept as a prefix, for a server behind a proxy.
	URL string
	// Key is an admin key, a workspace key or a run token. May be empty: then
	// only Health can be called.
	Key string
	// KeyFile is a file that holds the key; used if Key is empty.
	KeyFile string
	// HTTP does the requests. nil is a client with settings that fit: no overall
	// time-out, no redirects, no compression.
	HTTP *http.Client
	// RetryFor bounds the repeating of safe calls; 0 is DefaultRetryFor, negative
	// never repeats. A server that has never answered this client is tried for a
	// second only.
	RetryFor time.Duration
	// OnSilence is told when a call has been repeated for a second and goes on being
	// repeated, once for each such call, from any goroutine. nil tells nobody.
	OnSilence func()
	// UserAgent names the program; empty is "stockade-client".
	UserAgent string
}

// Client talks to one server with one credential. It may be used from many
// goroutines.
type Client struct {
	base      *url.URL
	key       string
	http      *http.Client
	retryFor  time.Duration
	onSilence func()
	userAgent string
	answered  *atomic.Bool // shared by clients made with WithKey
}

// New checks the configuration, reads the key file and returns a client. It does
// not connect.
func New(cfg Config) (*Client, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, errdefs.New(Invalid, "%q is not the address of a server", cfg.URL).
			WithNext("give one such as http://127.0.0.1:7878")
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, errdefs.New(Invalid, "the address of a server holds a user, a query or a fragment").
			WithNext("give the key in its own field")
	}
	u.Path = strings.TrimSuffix(u.Path, "/")
	u.RawPath = ""
	key := strings.TrimSpace(cfg.Key)
	if key == "" && cfg.KeyFile != "" {
		b, err := os.ReadFile(cfg.KeyFile)
		if err != nil {
			return nil, errdefs.Wrap(err, Unauthenticated, "the key file %s cannot be read: %v", cfg.KeyFile, err)
		}
		if key = strings.TrimSpace(string(b)); key == "" {
			return nil, errdefs.New(Unauthenticated, "the key file %s is empty", cfg.KeyFile)
		}
	}
	for _, c := range []byte(key) {
		if c <= ' ' || c >= 0x7f {
			return nil, errdefs.New(Unauthenticated, "the key holds a character that no key has")
		}
	}
	c := &Client{base: u, key: key, http: cfg.HTTP, retryFor: cfg.RetryFor, onSilence: cfg.OnSilence, userAgent: cfg.UserAgent, answered: new(atomic.Bool)}
	if c.http == nil {
		c.http = defaultHTTP()
	}
	if c.retryFor == 0 {
		c.retryFor = DefaultRetryFor
	}
	if c.userAgent == "" {
		c.userAgent = "stockade-client"
	}
	return c, nil
}

// WithKey returns a client of the same server, over the same connections, that
// uses another credential, such as the token of a run.
func (c *Client) WithKey(key string) *Client {
	d := *c
	d.key = strings.TrimSpace(key)
	return &d
}

// URL is the server's base address.
func (c *Client) URL() string { return c.base.String() }

// CloseIdle closes connections that are not in use.
func (c *Client) CloseIdle() { c.http.CloseIdleConnections() }

func defaultHTTP() *http.Client {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	return &http.Client{
		Transport: &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           dialer.DialContext,
			TLSHandshakeTimeout:   10 * time.Second,
			ExpectContinueTimeout: time.Second,
			MaxIdleConns:          256,
			MaxIdleConnsPerHost:   64,
			IdleConnTimeout:       90 * time.Second,
			DisableCompression:    true,
			ReadBufferSize:        64 << 10,
			WriteBufferSize:       64 << 10,
		},
		// The API never redirects; following one could carry the key elsewhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Health asks whether the server works; that it does not is no error. It needs no key.
func (c *Client) Health(ctx context.Context) (Health, error) {
	return doJSON[Health](ctx, c, call{method: http.MethodGet, path: "/v1/health", safe: true, also: http.StatusServiceUnavailable}, nil)
}
