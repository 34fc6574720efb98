package gateway

import (
	"bufio"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"
	"time"
)

// A provider that says the key back says it to nobody, in whatever part of its
// answer, and whatever encoding the run asks for.
func TestAnEchoedKeyIsInNoPartOfAnAnswer(t *testing.T) {
	t.Parallel()
	b := setup(t, func(w http.ResponseWriter, r *http.Request) {
		key := r.Header.Get("Authorization")
		w.Header().Set("Link", "<"+key+">")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		w.Header().Set("Trailer", "X-Echo, X-Sum")
		body := io.Writer(w)
		if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") || strings.HasSuffix(r.URL.Path, "/gzip") {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			defer z.Close()
			body = z
		}
		fmt.Fprintf(body, "your key is %s, is it not?", key)
		w.Header().Set("X-Echo", key)
		w.Header().Set("X-Sum", "7")
		w.Header().Set(http.TrailerPrefix+"X-Late", key)
	}, nil)
	get := func(path string) (*http.Response, string) {
		req, err := http.NewRequest(http.MethodGet, b.routes[0].BaseURL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept-Encoding", "gzip")
		req = req.WithContext(httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
			Got1xxResponse: func(_ int, h textproto.MIMEHeader) error { noCanary(t, http.Header(h), ""); return nil },
		}))
		res, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		src := io.Reader(res.Body)
		if res.Header.Get("Content-Encoding") == "gzip" {
			if src, err = gzip.NewReader(res.Body); err != nil {
				t.Fatal(err)
			}
		}
		got, err := io.ReadAll(src)
		if err != nil {
			t.Fatal(err)
		}
		noCanary(t, res.Header, string(got))
		noCanary(t, res.Trailer, "")
		return res, string(got)
	}
	res, body := get("/plain")
	if res.StatusCode != 200 || !strings.HasPrefix(body, "your key is Bearer ***") || res.Trailer.Get("X-Sum") != "7" {
		t.Errorf("%d %q, trailer %v", res.StatusCode, body, res.Trailer)
	}
	if res, body = get("/gzip"); res.StatusCode != 502 || !strings.Contains(body, "gzip") {
		t.Errorf("an answer that cannot be looked into: %d %q", res.StatusCode, body)
	}
}

// A body that is announced and never sent holds its connection no longer than any
// silent call.
func TestABodyThatNeverComes(t *testing.T) {
	t.Parallel()
	b := setup(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "early")
		_ = http.NewResponseController(w).Flush()
	}, func(c *Config) { c.Idle = 50 * time.Millisecond })
	for path, status := range map[string]string{"/nothing": "404", "/model/none/x": "404", "/model/openai/x": ""} {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", b.routes[0].Port))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second)) // instead of hanging
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n", path)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		resp.Body.Close()
		if !strings.HasPrefix(resp.Status, status) {
			t.Errorf("%s: %s, want %s", path, resp.Status, status)
		}
		if _, err := io.Copy(io.Discard, conn); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: the connection stays: %v", path, err)
		}
	}
}
