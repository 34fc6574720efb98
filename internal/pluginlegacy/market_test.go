package pluginlegacy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// serve is a marketplace that answers as a test wants.
func serve(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	return srv.URL
}

func quick(t *testing.T) market {
	m := newMarket()
	m.wait = time.Millisecond
	t.Cleanup(m.close)
	return m
}

var toy = release{"a", "toy", "1"}

// MK-01: a download with and without a length is told about every MiB and at its end.
func TestDownload(t *testing.T) {
	t.Parallel()
	content := make([]byte, 2<<20+100)
	for _, known := range []bool{true, false} {
		var asked atomic.Value
		at := serve(t, func(w http.ResponseWriter, r *http.Request) {
			asked.Store(r.URL.EscapedPath())
			if known {
				w.Header().Set("Content-Length", fmt.Sprint(len(content)))
			}
			_, _ = w.Write(content)
		})
		var seen []string
		total := 0
		if known {
			total = len(content)
		}
		b, err := quick(t).download(t.Context(), at+"/", release{"a", "to y", "1+x"}, func(m map[string]any) error {
			seen = append(seen, fmt.Sprint(m["download_current"], "/", m["download_total"]))
			if m["download_speed"].(float64) <= 0 {
				t.Errorf("%v", m)
			}
			return nil
		})
		want := []string{fmt.Sprint(1<<20, "/", total), fmt.Sprint(2<<20, "/", total), fmt.Sprint(len(content), "/", total)}
		if err != nil || len(b) != len(content) || !slices.Equal(seen, want) {
			t.Errorf("%d bytes, %v, told %v, want %v", len(b), err, seen, want)
		}
		if p := asked.Load(); p != "/api/v1/marketplace/plugins/download/a/to%20y/1+x" {
			t.Errorf("asked for %v", p)
		}
	}
}

// What a marketplace may get wrong, and how that is told. Nothing of it is kept.
func TestBadMarketplace(t *testing.T) {
	t.Parallel()
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop) })
	mib := make([]byte, 1<<20)
	for name, c := range map[string]struct {
		h    http.HandlerFunc
		code errdefs.Code
		text string
	}{
		"not there": {http.NotFound, errdefs.NotFound, "Failed to download plugin: HTTP 404"},
		"broken":    {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, errdefs.Unavailable, "HTTP 500"},
		"away":      {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, errdefs.Unavailable, "HTTP 503"},
		"says less than it announces": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = w.Write([]byte("PK"))
		}, errdefs.Unavailable, "unexpected EOF"},
		"announces too much": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000000000000")
			_, _ = w.Write(mib)
		}, errdefs.Exhausted, "more than 67108864 bytes"},
		"sends too much": {func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				if _, err := w.Write(mib); err != nil {
					return
				}
			}
		}, errdefs.Exhausted, "more than 67108864 bytes"},
		"never begins": {func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-stop:
			case <-r.Context().Done():
			}
		}, errdefs.Unavailable, "did not answer in time"},
		"never ends": {func(w http.ResponseWriter, r *http.Request) {
			_, _ = w.Write([]byte("PK"))
			_ = http.NewResponseController(w).Flush()
			select {
			case <-stop:
			case <-r.Context().Done():
			}
		}, errdefs.Unavailable, "did not answer in time"},
		"turns in a circle": {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) }, errdefs.Unavailable, "redirects more than 10 times"},
		"leads to a file": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "file:///etc/passwd", http.StatusFound)
		}, errdefs.Denied, "no HTTP address"},
		"hangs up": {func(w http.ResponseWriter, _ *http.Request) {
			c, _, err := w.(http.Hijacker).Hijack()
			if err == nil {
				c.Close()
			}
		}, errdefs.Unavailable, "Failed to download plugin"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := quick(t)
			if strings.HasPrefix(name, "never") {
				m.within = 300 * time.Millisecond
			}
			b, err := m.download(t.Context(), serve(t, c.h), toy, func(map[string]any) error { return nil })
			if b != nil {
				t.Errorf("%d bytes came", len(b))
			}
			isCode(t, err, c.code, c.text)
		})
	}
	t.Run("leaves encryption", func(t *testing.T) {
		t.Parallel()
		plain := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("PK")) })
		srv := httptest.NewTLSServer(http.RedirectHandler(plain, http.StatusFound))
		defer srv.Close()
		m := quick(t)
		m.client.Transport = srv.Client().Transport
		_, err := m.download(t.Context(), srv.URL, toy, func(map[string]any) error { return nil })
		isCode(t, err, errdefs.Denied, "encrypted")
	})
	t.Run("is nowhere", func(t *testing.T) {
		t.Parallel()
		m := quick(t)
		_, err := m.download(t.Context(), "http://user:secret@127.0.0.1:1", toy, nil)
		isCode(t, err, errdefs.Unavailable, "connection refused")
		if strings.Contains(err.Error(), "secret") {
			t.Error(err)
		}
		for _, bad := range []string{"", "file:///x", "ftp://h/", "h", "http://", "http://%zz"} {
			_, err := m.download(t.Context(), bad, toy, nil)
			isCode(t, err, errdefs.Invalid, "cloud_service_url")
		}
		for _, bad := range []release{{"", "x", "1"}, {"a", "..", "1"}, {"a", "x/y", "1"}, {"a", "x", "1\n"}, {strings.Repeat("a", 300), "x", "1"}} {
			_, err := m.download(t.Context(), "http://127.0.0.1:1", bad, nil)
			isCode(t, err, errdefs.Invalid)
		}
	})
}

// A marketplace that is away for a moment is asked again, before anything has come.
func TestMarketplaceComesBack(t *testing.T) {
	t.Parallel()
	var n atomic.Int32
	ok := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case n.Add(1) < marketTries:
			w.WriteHeader(http.StatusBadGateway)
		case r.URL.Path != "/elsewhere":
			http.Redirect(w, r, "/elsewhere", http.StatusFound)
		default:
			_, _ = w.Write([]byte("PK"))
		}
	})
	if b, err := quick(t).download(t.Context(), ok, toy, func(map[string]any) error { return nil }); err != nil || string(b) != "PK" {
		t.Errorf("%q, %v", b, err)
	}
}

// LM-37, LM-42: installing and upgrading from a marketplace; a package of somebody else
// is refused, and so is an answer that names no version.
func TestFromMarketplace(t *testing.T) {
	t.Parallel()
	packs := map[string][]byte{"1": pack("toy", "1"), "2": pack("toy", "2"), "3": pack("toy", "3"), "7": pack("other", "7")}
	var latest atomic.Value
	latest.Store(`{"code":0,"data":{"plugin":{"latest_version":"2"}}}`)
	at := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if v, ok := strings.CutPrefix(r.URL.Path, "/api/v1/marketplace/plugins/download/a/toy/"); ok {
			_, _ = w.Write(packs[v])
			return
		}
		if r.URL.Path != "/api/v1/marketplace/plugins/a/toy" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		_, _ = w.Write([]byte(latest.Load().(string)))
	})
	dir, r := t.TempDir(), newRunner()
	r.broken["3"] = true
	rc := runtimeConfig(4)
	rc.CloudServiceURL = at
	o := begin(t, config(dir, r), rc)
	from := func(version string) Install {
		return Install{Scope: scope, Source: "marketplace", Info: json.RawMessage(`{"plugin_author":"a","plugin_name":"toy","plugin_version":"` + version + `"}`)}
	}
	isCode(t, o.Install(t.Context(), from("7"), new(progress).tell), errdefs.Denied, "a/other")
	isCode(t, o.Install(t.Context(), Install{Scope: scope, Source: "marketplace", Info: json.RawMessage(`{}`)}, new(progress).tell), errdefs.Invalid)
	var p progress
	if err := o.Install(t.Context(), from("1"), p.tell); err != nil {
		t.Fatal(err)
	}
	if want := []string{tellDownload, tellDownload, tellDeps, tellDeps, tellSettings, tellLaunch}; !slices.Equal(p.all, want) || p.meta[1]["download_current"] != len(packs["1"]) {
		t.Errorf("told %q, %v", p.all, p.meta)
	}
	r.source = "local"
	isCode(t, o.Upgrade(t.Context(), scope, "a", "toy", new(progress).tell), errdefs.Conflict, "is not installed from marketplace")
	r.source = "marketplace"
	p = progress{}
	if err := o.Upgrade(t.Context(), scope, "a", "toy", p.tell); err != nil || r.version("a/toy") != "2" {
		t.Errorf("%v, %q runs", err, r.version("a/toy"))
	}
	if want := []string{tellLatest, tellDownload, tellDownload, tellDeps, tellDeps, tellSettings, tellLaunch, tellUpgraded}; !slices.Equal(p.all, want) {
		t.Errorf("told %q", p.all)
	}
	if s := r.settings[len(r.settings)-1]; s != `a/toy marketplace {"plugin_author":"a","plugin_name":"toy","plugin_version":"2"} w` {
		t.Errorf("the settings: %s", s)
	}
	p = progress{}
	if err := o.Upgrade(t.Context(), scope, "a", "toy", p.tell); err != nil || !slices.Equal(p.all, []string{tellLatest, tellUpToDate}) {
		t.Errorf("told %q, %v", p.all, err)
	}
	for _, bad := range []string{``, `[]`, `{"code":0}`, `{"code":0,"data":null}`, `{"code":1,"msg":"closed"}`, `{"code":0,"data":{"plugin":{"latest_version":"../x"}}}`,
		strings.Repeat(" ", maxAbout+2)} {
		latest.Store(bad)
		isCode(t, o.Upgrade(t.Context(), scope, "a", "toy", new(progress).tell), errdefs.Unavailable, "Failed to get plugin info")
	}
	latest.Store(`{"code":0,"data":{"plugin":{"latest_version":"3"}}}`)
	isCode(t, o.Upgrade(t.Context(), scope, "a", "toy", new(progress).tell), errdefs.Unavailable, "did not become ready")
	if got := onDisk(t, dir); got != "plugins/a__toy 2" || r.version("a/toy") != "2" {
		t.Errorf("%q, %q runs", got, r.version("a/toy"))
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	left := errors.New("LangBot left")
	cancel(left)
	if err := o.Upgrade(ctx, scope, "a", "toy", new(progress).tell); !errors.Is(err, left) {
		t.Error(err)
	}
}

// The marketplace's address: LangBot's word, then data/.env, then the published default.
func TestAddressOfTheMarketplace(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := begin(t, config(dir, newRunner()), pluginwire.RuntimeConfig{Profile: pluginwire.ProfileOSS})
	if got := o.cloudURL(); got != defaultCloud {
		t.Error(got)
	}
	for content, want := range map[string]string{
		"cloud_service_url=http://a.example # mine\n":        "http://a.example",
		"export CLOUD_SERVICE_URL=\"http://b.example/x/\"\n": "http://b.example/x/",
		"OTHER=1\n": defaultCloud, "\x00=\n": defaultCloud,
	} {
		writeFile(t, dir+"/.env", content)
		if got := o.cloudURL(); got != want {
			t.Errorf("%q: %s, want %s", content, got, want)
		}
	}
	o.Configured(pluginwire.RuntimeConfig{Profile: pluginwire.ProfileOSS, CloudServiceURL: "http://told.example"})
	if got := o.cloudURL(); got != "http://told.example" {
		t.Error(got)
	}
}

// FuzzAddress: whatever names a plugin or a service, a request stays on the service's
// host and below its path.
func FuzzAddress(f *testing.F) {
	f.Add("http://h.example/base/", "a", "b", "1")
	f.Add("https://u:p@h:1?q#f", "..", "%2e%2e", "a/b")
	f.Fuzz(func(t *testing.T, cloud, author, name, version string) {
		r := release{author, name, version}
		if r.check() != nil {
			return
		}
		at, err := address(cloud, "plugins", author, name, version)
		if err != nil {
			return
		}
		base, err1 := url.Parse(strings.TrimRight(cloud, "/"))
		got, err2 := url.Parse(at)
		if err1 != nil || err2 != nil || got.Host != base.Host || got.Scheme != base.Scheme || got.RawQuery != "" || got.Fragment != "" {
			t.Fatalf("%q: %v, %v", at, err1, err2)
		}
		if parts := strings.Split(got.EscapedPath(), "/"); len(parts) < 4 || slices.Contains(parts[len(parts)-3:], "..") || slices.Contains(parts[len(parts)-3:], "") {
			t.Fatalf("%q", at)
		}
	})
}
