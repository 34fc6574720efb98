package pluginlegacy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode"

	"github.com/cenkalti/backoff/v5"

	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Bounds of what a marketplace may answer (published SDK 0.7: 64 MiB in 60 s).
const (
	maxPackage   = 64 << 20
	maxAbout     = 1 << 20 // bytes of what it says of a plugin
	marketWithin = 60 * time.Second
	tellEvery    = 1 << 20 // bytes between two progress frames
	maxRedirects = 10
	marketTries  = 3 // while nothing has come yet
	marketWait   = 500 * time.Millisecond
)

// release is one version of a plugin in a marketplace, as install_info names it.
type release struct {
	Author  string `json:"plugin_author"`
	Name    string `json:"plugin_name"`
	Version string `json:"plugin_version"`
}

func (r release) check() error {
	for _, s := range []string{r.Author, r.Name, r.Version} {
		if s == "" || s == "." || s == ".." || len(s) > 256 || strings.ContainsFunc(s, func(c rune) bool { return c == '/' || c == '\\' || unicode.IsControl(c) }) {
			return errdefs.New(errdefs.Invalid, "%.100q names no plugin or version", s)
		}
	}
	return nil
}

// market is a client of marketplaces.
type market struct {
	client *http.Client
	within time.Duration
	wait   time.Duration
}

func newMarket() market {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.DisableCompression = true // what counts is what comes, and a package is compressed
	t.MaxResponseHeaderBytes = 64 << 10
	return market{within: marketWithin, wait: marketWait, client: &http.Client{Transport: t, CheckRedirect: mayFollow}}
}

func (m market) close() { m.client.CloseIdleConnections() }

// mayFollow bounds redirects, to HTTP alone, and never from what is encrypted to what
// is not: a package is code.
func mayFollow(next *http.Request, before []*http.Request) error {
	from := before[len(before)-1].URL
	switch {
	case len(before) >= maxRedirects:
		return errdefs.New(errdefs.Unavailable, "the marketplace redirects more than %d times", maxRedirects)
	case next.URL.Scheme != "http" && next.URL.Scheme != "https":
		return errdefs.New(errdefs.Denied, "the marketplace redirects to something that is no HTTP address")
	case from.Scheme == "https" && next.URL.Scheme == "http":
		return errdefs.New(errdefs.Denied, "the marketplace redirects from an encrypted address to one that is not")
	}
	return nil
}

// address joins the service's address and a path, each element escaped.
func address(cloud string, elem ...string) (string, error) {
	u, err := url.Parse(strings.TrimRight(cloud, "/"))
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return "", errdefs.New(errdefs.Invalid, "cloud_service_url is no address of an HTTP service").
			WithNext("set it in LangBot's configuration, with http:// or https://")
	}
	u.RawQuery, u.Fragment = "", ""
	s := u.String()
	for _, e := range elem {
		s += "/" + url.PathEscape(e)
	}
	return s, nil
}

// get asks, again while there is no answer or one that says to come back.
func (m market) get(ctx context.Context, at string) (*http.Response, error) {
	return backoff.Retry(ctx, func() (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
		if err != nil {
			return nil, backoff.Permanent(err)
		}
		req.Header.Set("User-Agent", "stockade")
		resp, err := m.client.Do(req)
		if err != nil {
			if _, ours := errors.AsType[*errdefs.Error](err); ours {
				err = backoff.Permanent(err)
			}
			return nil, err
		}
		switch resp.StatusCode {
		case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
			err = status(resp)
			_ = resp.Body.Close()
			return nil, err
		}
		return resp, nil
	}, backoff.WithBackOff(backoff.NewConstantBackOff(m.wait)), backoff.WithMaxTries(marketTries), backoff.WithMaxElapsedTime(0))
}

// statusError is an answer that is not the one hoped for.
type statusError struct{ resp *http.Response }

func status(resp *http.Response) error { return &statusError{resp} }

func (e *statusError) Error() string { return "HTTP " + e.resp.Status }

// failure puts why a request failed into words; url is shown without credentials.
func failure(ctx context.Context, err error, what string) error {
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return e
	}
	if e, ok := errors.AsType[*statusError](err); ok {
		code := errdefs.Unavailable
		if e.resp.StatusCode == http.StatusNotFound {
			code = errdefs.NotFound
		}
		return pluginwire.WithClass(pluginwire.ClassRuntime, errdefs.New(code, "%s: HTTP %d", what, e.resp.StatusCode))
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return errdefs.Wrap(err, errdefs.Unavailable, "%s: the marketplace did not answer in time", what)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "%s: %s", what, deptree.Redact(err.Error())).
		WithNext("see whether cloud_service_url is right and reachable from here")
}

// download gets the package of a release and tells how far it is about every MiB.
func (m market) download(ctx context.Context, cloud string, r release, tell func(map[string]any) error) ([]byte, error) {
	const what = "Failed to download plugin"
	if err := r.check(); err != nil {
		return nil, err
	}
	at, err := address(cloud, "api", "v1", "marketplace", "plugins", "download", r.Author, r.Name, r.Version)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, m.within)
	defer cancel()
	began := time.Now()
	resp, err := m.get(limited, at)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = status(resp)
		_ = resp.Body.Close()
	}
	if err != nil {
		return nil, failure(ctx, err, what)
	}
	defer resp.Body.Close()
	tooLarge := errdefs.New(errdefs.Exhausted, "%s: the package has more than %d bytes, the limit", what, maxPackage)
	if resp.ContentLength > maxPackage {
		return nil, tooLarge
	}
	progress := func(n int) error {
		return tell(map[string]any{"download_current": n, "download_total": max(0, resp.ContentLength), "download_speed": rate(int64(n), began)})
	}
	var b bytes.Buffer // grows with what comes: what was announced may be a lie
	for {
		n, err := io.CopyN(&b, resp.Body, min(tellEvery, maxPackage+1-int64(b.Len())))
		switch {
		case b.Len() > maxPackage:
			return nil, tooLarge
		case err == io.EOF:
			return b.Bytes(), progress(b.Len())
		case err != nil:
			return nil, failure(ctx, err, what)
		case n > 0:
			if err := progress(b.Len()); err != nil {
				return nil, err
			}
		}
	}
}

// latest returns the newest release of a plugin.
func (m market) latest(ctx context.Context, cloud, author, name string) (release, error) {
	const what = "Failed to get plugin info"
	r := release{Author: author, Name: name, Version: "latest"}
	if err := r.check(); err != nil {
		return r, err
	}
	at, err := address(cloud, "api", "v1", "marketplace", "plugins", author, name)
	if err != nil {
		return r, err
	}
	limited, cancel := context.WithTimeout(ctx, m.within)
	defer cancel()
	resp, err := m.get(limited, at)
	if err != nil {
		return r, failure(ctx, err, what)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return r, failure(ctx, status(resp), what)
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAbout+1))
	if err != nil {
		return r, failure(ctx, err, what)
	}
	var about struct {
		Code int    `json:"code"`
		Msg  string `json:"msg"`
		Data struct {
			Plugin struct {
				Author  string `json:"author"`
				Name    string `json:"name"`
				Version string `json:"latest_version"`
			} `json:"plugin"`
		} `json:"data"`
	}
	if err := json.Unmarshal(b, &about); err != nil || len(b) > maxAbout {
		return r, errdefs.New(errdefs.Unavailable, "%s: the marketplace's answer is not the expected document", what)
	}
	if about.Code != 0 {
		return r, errdefs.New(errdefs.Unavailable, "%s: %s", what, cut(strings.ToValidUTF8(about.Msg, "?"), 300))
	}
	r.Version = about.Data.Plugin.Version
	if err := r.check(); err != nil {
		return r, errdefs.New(errdefs.Unavailable, "%s: the marketplace names no latest version", what)
	}
	return r, nil
}
