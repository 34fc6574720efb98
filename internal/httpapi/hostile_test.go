package httpapi

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func TestBadBodiesAreProblems(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const ok = `{"request_id":"r","argv":["true"]}`
	for name, c := range map[string]struct {
		body   string
		status int
		says   string
	}{
		"empty":            {"", 400, "required"},
		"not json":         {"{", 400, "not JSON"},
		"two values":       {ok + ok, 400, "more than one"},
		"trailing":         {ok + "x", 400, "more than one"},
		"array":            {"[]", 400, "object"},
		"null":             {"null", 400, ""},
		"number":           {"7", 400, ""},
		"unknown field":    {`{"request_id":"r","argv":["x"],"shell":true}`, 400, "shell"},
		"other case":       {`{"Request_ID":"r","argv":["x"]}`, 400, "Request_ID"},
		"missing field":    {`{"argv":["x"]}`, 400, "request_id"},
		"wrong type":       {`{"request_id":7,"argv":["x"]}`, 400, "request_id"},
		"wrong inner type": {`{"request_id":"r","argv":[7]}`, 400, "argv"},
		"null list":        {`{"request_id":"r","argv":null}`, 400, "argv"},
		"empty list":       {`{"request_id":"r","argv":[]}`, 400, "argv"},
		"long id":          {`{"request_id":"` + strings.Repeat("r", 129) + `","argv":["x"]}`, 400, "request_id"},
		"twice":            {`{"request_id":"a","request_id":"b","argv":["x"]}`, 400, "twice"},
		"twice inside":     {`{"request_id":"a","argv":["x"],"env":{"A":"1","A":"2"}}`, 400, "twice"},
		"bad utf-8":        {"{\"request_id\":\"\xff\",\"argv\":[\"x\"]}", 400, "UTF-8"},
		"deep":             {strings.Repeat("[", 100_000), 400, "deeper"},
		"deep objects":     {strings.Repeat(`{"a":`, 5000) + "1" + strings.Repeat("}", 5000), 400, "deeper"},
		"huge number":      {`{"request_id":"r","argv":["x"],"limits":{"pids":1e300}}`, 400, ""},
		"fraction":         {`{"request_id":"r","argv":["x"],"limits":{"pids":1.5}}`, 400, "pids"},
		"negative":         {`{"request_id":"r","argv":["x"],"limits":{"pids":-1}}`, 400, "pids"},
		"bad enum":         {`{"request_id":"r","argv":["x"],"limits":{"overflow":"lose"}}`, 400, "overflow"},
		"tiny terminal":    {`{"request_id":"r","argv":["x"],"pty":{"rows":0,"cols":80}}`, 400, "rows"},
		"huge terminal":    {`{"request_id":"r","argv":["x"],"pty":{"rows":1,"cols":99999}}`, 400, "cols"},
		"too large":        {`{"request_id":"r","argv":["` + strings.Repeat("x", maxOpen) + `"]}`, 413, "larger than"},
	} {
		resp, b := r.do("POST", "/v1/processes", "run", strings.NewReader(c.body), "Content-Type: application/json")
		p := r.problem(resp, b, c.status, errdefs.Invalid)
		if !strings.Contains(p.Detail, c.says) {
			t.Errorf("%s: %q does not say %q", name, p.Detail, c.says)
		}
		if strings.Contains(string(b), "xxxxxxxxxx") {
			t.Errorf("%s: the answer repeats the body", name)
		}
	}
	if calls := r.broker.noted(); len(calls) > 0 {
		t.Errorf("the broker was reached: %v", calls)
	}
	resp, b := r.do("POST", "/v1/processes", "run", strings.NewReader(ok), "Content-Type: application/json; charset=utf-8")
	if resp.StatusCode != 200 {
		t.Errorf("a good body is refused: %d %s", resp.StatusCode, b)
	}
	resp, b = r.do("POST", "/v1/workspaces", "admin", strings.NewReader(`{"name":"`+strings.Repeat("x", maxJSON)+`"}`))
	r.problem(resp, b, 413, errdefs.Invalid)
	// Of unknown length, and too long.
	resp, b = r.do("POST", "/v1/processes", "run", io.MultiReader(strings.NewReader(strings.Repeat(" ", maxOpen)), strings.NewReader("{}")))
	r.problem(resp, b, 413, errdefs.Invalid)
}

// A body that is announced and never sent holds nobody up: the answer comes, and
// the connection is given back.
func TestABodyThatNeverComes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.h.bodyTime = 20 * time.Millisecond
	r.broker.err = errdefs.New(errdefs.NotFound, "there is no such box")
	for name, c := range map[string]struct {
		request string
		status  string
	}{
		"no credential":    {"POST /v1/processes HTTP/1.1\r\nContent-Length: 10", "401"},
		"no route":         {"POST /nothing HTTP/1.1\r\nContent-Length: 10", "401"},
		"in pieces":        {"POST /v1/processes HTTP/1.1\r\nTransfer-Encoding: chunked", "401"},
		"takes no body":    {"GET /v1/health HTTP/1.1\r\nContent-Length: 10", "400"},
		"not its media":    {"POST /v1/processes HTTP/1.1\r\nAuthorization: Bearer run\r\nContent-Type: text/html\r\nContent-Length: 10", "415"},
		"a missing box":    {"PUT /v1/boxes/box_x/files HTTP/1.1\r\nAuthorization: Bearer workspace\r\nContent-Length: 10", "404"},
		"never whole":      {"POST /v1/workspaces HTTP/1.1\r\nAuthorization: Bearer admin\r\nContent-Type: application/json\r\nContent-Length: 10", "400"},
		"too much":         {"POST /v1/workspaces HTTP/1.1\r\nAuthorization: Bearer admin\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked", "413"},
		"a query not read": {"PUT /v1/boxes/box_x/files?at=x HTTP/1.1\r\nAuthorization: Bearer workspace\r\nContent-Length: 10", "400"},
	} {
		conn, err := net.Dial("tcp", r.server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second)) // instead of hanging
		fmt.Fprintf(conn, "%s\r\nHost: x\r\n\r\n", c.request)
		if name == "too much" {
			fmt.Fprintf(conn, "%x\r\n%s\r\n", maxJSON+1, strings.Repeat("x", maxJSON+1)) // and the rest never
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if _, err := io.Copy(io.Discard, conn); err != nil {
			t.Errorf("%s: the connection stays: %v", name, err)
		}
		resp.Body.Close()
		if !strings.HasPrefix(resp.Status, c.status) {
			t.Errorf("%s: %s, want %s", name, resp.Status, c.status)
		}
	}
}

func TestBadMediaTypes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, ct := range []string{"text/plain", "application/x+json", "application/json; charset=latin1", "multipart/form-data; boundary=x", "/", ";;"} {
		resp, b := r.do("POST", "/v1/processes", "run", strings.NewReader(`{"request_id":"r","argv":["x"]}`), "Content-Type: "+ct)
		r.problem(resp, b, 415, errdefs.Invalid)
	}
	resp, b := r.do("POST", "/v1/processes", "run", strings.NewReader("{}"), "Content-Encoding: gzip")
	r.problem(resp, b, 415, errdefs.Invalid)
	resp, b = r.do("POST", "/v1/processes", "run", strings.NewReader("{}"), "Content-Type: application/json", "Content-Type: text/plain")
	r.problem(resp, b, 415, errdefs.Invalid)
	resp, b = r.do("PUT", "/v1/boxes/b/files", "workspace", strings.NewReader("x"), "Content-Type: application/zip")
	r.problem(resp, b, 415, errdefs.Invalid)
	resp, b = r.do("GET", "/v1/runs", "workspace", strings.NewReader("x"))
	r.problem(resp, b, 400, errdefs.Invalid)
	// What a caller accepts does not change what an error looks like.
	resp, b = r.do("GET", "/v1/nothing", "run", nil, "Accept: text/html")
	r.problem(resp, b, 404, errdefs.NotFound)
	resp, b = r.do("GET", "/v1/runs?limit=x", "workspace", nil, "Accept: text/html, application/xml;q=0.9")
	r.problem(resp, b, 400, errdefs.Invalid)
}

func TestBadQueries(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	h := "/v1/processes/" + fakeHandle
	for _, q := range []struct{ method, key, target string }{
		{"GET", "workspace", "/v1/runs?limit=0"},
		{"GET", "workspace", "/v1/runs?limit=1001"},
		{"GET", "workspace", "/v1/runs?limit=-1"},
		{"GET", "workspace", "/v1/runs?limit=x"},
		{"GET", "workspace", "/v1/runs?limit=99999999999999999999"},
		{"GET", "workspace", "/v1/runs?limit=1&limit=2"},
		{"GET", "workspace", "/v1/runs?page=2"},
		{"GET", "workspace", "/v1/runs?after=" + strings.Repeat("a", 300)},
		{"GET", "workspace", "/v1/runs?a=%zz"},
		{"GET", "workspace", "/v1/runs?a=1;b=2"},
		{"GET", "workspace", "/v1/processes?live=perhaps"},
		{"GET", "run", "/v1/processes/by-request"},
		{"GET", "run", "/v1/processes/by-request?request_id=" + strings.Repeat("a", 129)},
		{"POST", "run", h + "/ack"},
		{"POST", "run", h + "/ack?cursor="},
		{"GET", "run", h + "/log?cursor=" + strings.Repeat("1", 65)},
		{"GET", "run", h + "/log?max_bytes=-1"},
		{"GET", "run", h + "/log?max_bytes=99999999999"},
		{"GET", "run", h + "/log?wait_ms=30001"},
		{"GET", "run", h + "/log?wait_ms=1e3"},
		{"GET", "run", h + "/log?follow=true"},
		{"GET", "run", h + "/log?ack=maybe"},
		{"GET", "run", h + "/log?nothing=1"},
		{"PUT", "run", h + "/stdin"},
		{"PUT", "run", h + "/stdin?offset="},
		{"PUT", "run", h + "/stdin?offset=-1&eof=true"},
		{"PUT", "run", h + "/stdin?offset=9007199254740993&eof=true"},
		{"PUT", "run", h + "/stdin?offset=9223372036854775808&eof=true"},
		{"PUT", "run", h + "/stdin?offset=0"}, // nothing to write
		{"PUT", "run", h + "/stdin?offset=0&eof=yes"},
		{"GET", "run", h + "/attach?cursor=" + strings.Repeat("1", 65)},
	} {
		resp, b := r.do(q.method, q.target, q.key, nil)
		r.problem(resp, b, 400, errdefs.Invalid)
	}
	if calls := r.broker.noted(); len(calls) > 0 {
		t.Errorf("the broker was reached: %v", calls)
	}
}

func TestUnknownRoutesAndMethods(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, path := range []string{"/", "/v1", "/v1/", "/v2/runs", "/v1/runs/", "/v1/nothing", "/v1/processes/a/b/c", "/openapi.yaml", "/schemas/Run.json", "/metrics", "/docs/"} {
		resp, b := r.do("GET", path, "admin", nil)
		r.problem(resp, b, 404, errdefs.NotFound)
	}
	for _, c := range []struct{ method, path, allow string }{
		{"PUT", "/v1/runs", "GET, POST"},
		{"DELETE", "/v1/health", "GET"},
		{"OPTIONS", "/v1/runs", "GET, POST"},
		{"HEAD", "/v1/runs", "GET, POST"},
		{"TRACE", "/v1/runs", "GET, POST"},
		{"BREW", "/v1/images", "DELETE, GET, POST, PUT"},
	} {
		resp, b := r.do(c.method, c.path, "admin", nil)
		if got := resp.Header.Get("Allow"); got != c.allow {
			t.Errorf("%s %s: Allow is %q, want %q", c.method, c.path, got, c.allow)
		}
		if c.method != "HEAD" {
			r.problem(resp, b, 405, errdefs.Invalid)
		} else if resp.StatusCode != 405 {
			t.Errorf("HEAD: %d", resp.StatusCode)
		}
	}
}

// raw sends bytes as they are and returns the answer.
func (r *rig) raw(text string) (*http.Response, []byte) {
	r.t.Helper()
	c, err := net.Dial("tcp", r.server.Listener.Addr().String())
	if err != nil {
		r.t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, text); err != nil {
		r.t.Fatal(err)
	}
	req := httptest.NewRequest("GET", "/raw", nil)
	resp, err := http.ReadResponse(bufio.NewReader(c), req)
	if err != nil {
		r.t.Fatalf("%.80q: %v", text, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp, b
}

func TestPathEscapes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const auth = " HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer workspace\r\n\r\n"
	for _, path := range []string{"/v1/../v1/runs", "/v1//runs", "//v1/runs", "/v1/runs/.", "/v1/runs/..", "/v1/./runs",
		"/v1/runs/%2e%2e", "/v1/runs/%2e", "/%2e%2e/v1/runs", "/v1/boxes/%2e%2e/files", "/v1/boxes/a%2F..%2F..%2Fruns"} {
		resp, b := r.raw("GET " + path + auth)
		r.problem(resp, b, 404, errdefs.NotFound)
	}
	if calls := r.broker.noted(); len(calls) > 0 {
		t.Errorf("these were reached: %v", calls)
	}
	// A slash that is part of a name stays one: it names something that is not there.
	if resp, b := r.raw("GET /v1/runs/a%2Fb" + auth); resp.StatusCode != 200 {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
	if calls := r.broker.noted(); len(calls) != 1 || calls[0] != "run a/b" {
		t.Errorf("the broker was asked %v", calls)
	}
	resp, b := r.raw("GET /v1/runs/" + strings.Repeat("a", maxURI) + auth)
	r.problem(resp, b, 414, errdefs.Invalid)
	resp, b = r.raw("GET /v1/runs/%00" + auth)
	if resp.StatusCode >= 500 {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
}

func TestCredentials(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	basic := func(user, password string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
	}
	for name, c := range map[string]struct {
		path   string
		values []string
		ok     bool
	}{
		"bearer":                 {"/v1/targets", []string{"Bearer admin"}, true},
		"scheme in any case":     {"/v1/targets", []string{"bEARER admin"}, true},
		"unknown":                {"/v1/targets", []string{"Bearer nobody"}, false},
		"empty":                  {"/v1/targets", []string{"Bearer "}, false},
		"no scheme":              {"/v1/targets", []string{"admin"}, false},
		"twice":                  {"/v1/targets", []string{"Bearer admin", "Bearer admin"}, false},
		"long":                   {"/v1/targets", []string{"Bearer " + strings.Repeat("a", 600)}, false},
		"basic on an operation":  {"/v1/targets", []string{basic("me", "admin")}, false},
		"basic on the docs":      {"/docs", []string{basic("me", "run")}, true},
		"basic on the document":  {"/openapi.json", []string{basic("", "workspace")}, true},
		"key as the user's name": {"/docs", []string{basic("admin", "")}, false},
		"basic not base 64":      {"/docs", []string{"Basic %%%"}, false},
		"bearer on the docs":     {"/docs", []string{"Bearer admin"}, true},
	} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", r.server.URL+c.path, nil)
		req.Header["Authorization"] = c.values
		resp, err := r.server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if c.ok {
			if resp.StatusCode != 200 {
				t.Errorf("%s: %d %s", name, resp.StatusCode, b)
			}
			continue
		}
		r.problem(resp, b, 401, errdefs.Unauthenticated)
		offers := strings.Join(resp.Header.Values("WWW-Authenticate"), " | ")
		if strings.Contains(offers, "Basic") != (c.path != "/v1/targets") || !strings.Contains(offers, "Bearer") {
			t.Errorf("%s: the offers are %q", name, offers)
		}
	}
	resp, b := r.do("GET", "/v1/targets", "broken", nil)
	r.problem(resp, b, 503, errdefs.Unavailable)
}

func TestPanicsAndFaultsAreLoggedWithTheReferenceTold(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.broker.open = func(context.Context, api.OpenRequest) (api.Process, error) { panic("secret-xyz") }
	resp, b := r.do("POST", "/v1/processes", "run", strings.NewReader(`{"request_id":"r","argv":["x"]}`))
	p := r.problem(resp, b, 500, errdefs.Internal)
	told(t, r, p)
	if ref := resp.Header.Get(RequestHeader); ref == "" || !strings.Contains(p.Next, ref) {
		t.Errorf("the header names %q, the problem says %q", ref, p.Next)
	}
	r.broker.open = func(context.Context, api.OpenRequest) (api.Process, error) {
		return api.Process{}, errors.New("secret-xyz")
	}
	resp, b = r.do("POST", "/v1/processes", "run", strings.NewReader(`{"request_id":"r","argv":["x"]}`))
	told(t, r, r.problem(resp, b, 500, errdefs.Internal))
}

func told(t *testing.T, r *rig, p api.Problem) {
	t.Helper()
	var ref string
	if _, err := fmt.Sscanf(p.Next, "look for %q in the server's log", &ref); err != nil {
		t.Fatalf("no reference in %q", p.Next)
	}
	if strings.Contains(p.Detail+p.Next, "secret-xyz") {
		t.Error("the caller sees the cause")
	}
	for line := range strings.SplitSeq(r.logs.String(), "\n") {
		if strings.Contains(line, ref) && strings.Contains(line, "secret-xyz") {
			return
		}
	}
	t.Errorf("the log has no line with %q and the cause:\n%s", ref, r.logs.String())
}

func TestInputIsRefusedWithTheWindow(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.broker.stdin = func(int64, []byte, bool) (api.StdinState, error) {
		return api.StdinState{}, errdefs.New(errdefs.Exhausted, "the child does not read")
	}
	path := "/v1/processes/" + fakeHandle + "/stdin?offset=5"
	resp, b := r.do("PUT", path, "run", strings.NewReader("x"))
	p := r.problem(resp, b, 429, errdefs.Exhausted)
	if p.Facts["window_bytes"] != "0" || resp.Header.Get("Retry-After") == "" {
		t.Errorf("the free window is not told: %+v, Retry-After %q", p, resp.Header.Get("Retry-After"))
	}
	resp, b = r.do("PUT", path, "run", strings.NewReader(strings.Repeat("x", 1<<20+1)))
	r.problem(resp, b, 413, errdefs.Invalid)
	var got string
	r.broker.stdin = func(o int64, d []byte, eof bool) (api.StdinState, error) {
		got = fmt.Sprint(o, " ", len(d), " ", eof)
		return api.StdinState{Accepted: o + 3, Window: 7}, nil
	}
	// Of unknown length, with any media type.
	resp, b = r.do("PUT", path, "run", io.MultiReader(strings.NewReader("\x00\xff"), strings.NewReader("z")), "Content-Type: text/plain")
	if resp.StatusCode != 200 || got != "5 3 false" || !strings.Contains(string(b), `"accepted":8`) {
		t.Errorf("%d %s; the broker got %q", resp.StatusCode, b, got)
	}
}

func TestFilesStreamBothWays(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	big := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	resp, b := r.do("PUT", "/v1/boxes/b/files?path=a%2Fb%20c", "workspace", io.MultiReader(strings.NewReader(big)), "Content-Type: application/x-tar")
	if resp.StatusCode != 204 || string(r.boxes.upload) != big {
		t.Errorf("%d %s; %d bytes arrived", resp.StatusCode, b, len(r.boxes.upload))
	}
	r.boxes.getData = []byte(big)
	resp, b = r.do("GET", "/v1/boxes/b/files?path=x", "workspace", nil)
	if resp.StatusCode != 200 || string(b) != big || resp.Header.Get("Content-Type") != "application/x-tar" {
		t.Errorf("%d, %d bytes, %s", resp.StatusCode, len(b), resp.Header)
	}
	if calls := r.broker.noted(); calls[0] != "put-files a/b c" || calls[1] != "get-files x" {
		t.Errorf("asked for %q", calls)
	}
	// An error after the first byte must not look like the end.
	r.boxes.getErr = errdefs.New(errdefs.Unavailable, "the host is gone")
	req, _ := http.NewRequestWithContext(t.Context(), "GET", r.server.URL+"/v1/boxes/b/files", nil)
	req.Header.Set("Authorization", "Bearer workspace")
	broken, err := r.server.Client().Do(req)
	if err == nil {
		_, err = io.ReadAll(broken.Body)
		broken.Body.Close()
	}
	if err == nil {
		t.Error("an answer that broke off reads as whole")
	}
	// Before the first byte it is an ordinary problem.
	r.boxes.getData = nil
	r.broker.err = errdefs.New(errdefs.NotFound, "no such path")
	resp, b = r.do("GET", "/v1/boxes/b/files?path=x", "workspace", nil)
	r.problem(resp, b, 404, errdefs.NotFound)
}

func FuzzCheckJSON(f *testing.F) {
	for _, s := range []string{`{"a":[1,{"b":null}],"c":"d"}`, `[]`, `{"a":1,"a":2}`, "\xff", `{`, `"x" "y"`, `{"a":{"a":1}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := checkJSON(b); err == nil && !jsonValid(b) {
			t.Fatalf("%q is taken for JSON", b)
		}
	})
}
