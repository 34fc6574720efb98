package httpapi

import (
	"encoding/json"
	"flag"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// sampleRequest fills a route's path and gives it a body and query it accepts.
func sampleRequest(rt *route) (path string, body io.Reader, head []string) {
	path = rt.op.Path
	for name, v := range map[string]string{"handle": fakeHandle, "id": "box_x", "name": "local", "workspace": "acme", "daemon": "laptop"} {
		path = strings.ReplaceAll(path, "{"+name+"}", v)
	}
	switch rt.op.OperationID {
	case "get-process-by-request":
		path += "?request_id=r1"
	case "ack-output":
		path += "?cursor=aaaaaa.0"
	case "write-input":
		path += "?offset=0&eof=true"
	case "remove-image":
		path += "?ref=x"
	}
	switch rt.media {
	case jsonMedia:
		head = []string{"Content-Type: application/json"}
		body = strings.NewReader(map[string]string{
			"create-run": `{"box":"b"}`, "create-workspace": `{"name":"w"}`, "clear-fence": `{"reason":"looked at it"}`,
			"open-process": `{"request_id":"r","argv":["true"]}`, "close-process-by-request": `{"request_id":"r"}`,
			"signal-process": `{"signal":"SIGINT"}`, "resize-process": `{"rows":24,"cols":80}`,
			"run-relay-job": `{"daemon_id":"laptop","payload":{}}`, "clear-relay-fence": `{"fence":"f1","reason":"looked at it"}`,
		}[rt.op.OperationID])
		if body.(*strings.Reader).Len() == 0 {
			body = strings.NewReader("{}")
		}
	case tarMedia:
		head = []string{"Content-Type: application/x-tar"}
		body = strings.NewReader("tar")
	case byteMedia:
		body = strings.NewReader("input")
	}
	return path, body, head
}

// A probe looks at the status code alone.
func TestHealthIsAStatusCode(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for status, code := range map[string]int{"ok": 200, "starting": 200, "failing": 503} {
		r.h.cfg.Health = func() string { return status }
		resp, b := r.do("GET", "/v1/health", "", nil)
		if resp.StatusCode != code || !strings.Contains(string(b), `"status":"`+status+`"`) || resp.Header.Get("Content-Type") != jsonMedia {
			t.Errorf("%s: %d %s", status, resp.StatusCode, b)
		}
	}
}

func TestEveryRouteNeedsACredentialButHealth(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, rt := range r.h.order {
		path, body, head := sampleRequest(rt)
		resp, b := r.do(rt.op.Method, path, "", body, head...)
		if rt.op.OperationID == "health" {
			if resp.StatusCode != http.StatusOK {
				t.Errorf("health: %d %s", resp.StatusCode, b)
			}
			continue
		}
		p := r.problem(resp, b, http.StatusUnauthorized, errdefs.Unauthenticated)
		if p.Next == "" || !strings.HasPrefix(resp.Header.Get("WWW-Authenticate"), "Bearer ") {
			t.Errorf("%s: no way to authenticate is named: %+v, %q", rt.op.OperationID, p, resp.Header.Get("WWW-Authenticate"))
		}
	}
	if calls := r.broker.noted(); len(calls) > 0 {
		t.Errorf("without a credential these were reached: %v", calls)
	}
	// Also what does not exist is not told to strangers.
	resp, b := r.do("GET", "/v1/nothing", "", nil)
	r.problem(resp, b, http.StatusUnauthorized, errdefs.Unauthenticated)
}

func TestEachKindOfCredentialOnEachRoute(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, rt := range r.h.order {
		for _, kind := range authz.Kinds() {
			path, body, head := sampleRequest(rt)
			before := len(r.broker.noted())
			resp, b := r.do(rt.op.Method, path, string(kind), body, head...)
			allowed := rt.action == public || rt.action == anyone || authz.Allowed(kind, rt.action)
			switch {
			case !allowed:
				r.problem(resp, b, http.StatusForbidden, errdefs.Denied)
				if after := r.broker.noted(); len(after) != before {
					t.Errorf("%s with %s was denied after reaching %v", rt.op.OperationID, kind, after[before:])
				}
			case rt.op.OperationID == "attach-process":
				r.problem(resp, b, http.StatusUpgradeRequired, errdefs.Invalid)
			case resp.StatusCode >= 300:
				t.Errorf("%s with %s: %d %s", rt.op.OperationID, kind, resp.StatusCode, b)
			case rt.op.Responses[resp.Status[:3]] == nil:
				t.Errorf("%s answers %d, which it does not declare", rt.op.OperationID, resp.StatusCode)
			}
		}
	}
}

func TestEveryActionHasARoute(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	seen := map[authz.Action]bool{}
	for _, rt := range r.h.order {
		seen[rt.action] = true
	}
	for _, a := range authz.Actions() {
		if !seen[a] {
			t.Errorf("no route asks for the right %q", a)
		}
	}
}

func TestErrorsOfOwnersBecomeProblems(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, code := range errdefs.Codes() {
		r.broker.mu.Lock()
		r.broker.err = errdefs.New(code, "refused on purpose").WithNext("do something").With("limit", "7")
		r.broker.mu.Unlock()
		for _, rt := range r.h.order {
			switch rt.op.OperationID {
			case "health", "metrics", "openapi", "docs", "attach-process":
				continue
			}
			kind := slices.IndexFunc(authz.Kinds(), func(k authz.Kind) bool { return authz.Allowed(k, rt.action) })
			path, body, head := sampleRequest(rt)
			resp, b := r.do(rt.op.Method, path, string(authz.Kinds()[kind]), body, head...)
			p := r.problem(resp, b, api.Status(code), code)
			if p.Detail != "refused on purpose" || p.Next != "do something" || p.Facts["limit"] != "7" {
				t.Errorf("%s: the problem lost what the error said: %+v", rt.op.OperationID, p)
			}
			if wait := resp.Header.Get("Retry-After"); (wait != "") != (code == errdefs.Exhausted || code == errdefs.Unavailable) {
				t.Errorf("%s %s: Retry-After is %q", rt.op.OperationID, code, wait)
			}
		}
	}
}

func TestDocumentIsWhole(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	resp, b := r.do("GET", "/openapi.json", "run", nil)
	if resp.StatusCode != 200 || !json.Valid(b) {
		t.Fatalf("%d %.200s", resp.StatusCode, b)
	}
	var doc struct {
		OpenAPI string
		Paths   map[string]map[string]struct {
			OperationID, Summary, Description string
			Tags                              []string
			Security                          *[]map[string][]string
			Parameters                        []struct{ Name, In string }
			Responses                         map[string]struct {
				Content map[string]struct {
					Schema map[string]any
				}
			}
		}
		Components struct{ Schemas map[string]any }
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(doc.OpenAPI, "3.1") {
		t.Errorf("openapi is %q", doc.OpenAPI)
	}
	for _, m := range regexp.MustCompile(`"\$ref": "#/components/schemas/([^"]*)"`).FindAllSubmatch(b, -1) {
		if doc.Components.Schemas[string(m[1])] == nil {
			t.Errorf("the schema %s is used and not there", m[1])
		}
	}
	ids := map[string]bool{}
	count := 0
	for path, ops := range doc.Paths {
		for method, op := range ops {
			count++
			where := method + " " + path
			if ids[op.OperationID] || op.OperationID == "" {
				t.Errorf("%s: the operation id %q is missing or used twice", where, op.OperationID)
			}
			ids[op.OperationID] = true
			if op.Summary == "" || op.Description == "" || len(op.Tags) != 1 || op.Security == nil {
				t.Errorf("%s lacks a summary, description, tag or security", where)
			}
			for _, m := range regexp.MustCompile(`\{(\w+)\}`).FindAllStringSubmatch(path, -1) {
				if !slices.ContainsFunc(op.Parameters, func(p struct{ Name, In string }) bool { return p.Name == m[1] && p.In == "path" }) {
					t.Errorf("%s does not describe its parameter %s", where, m[1])
				}
			}
			good := false
			for status, resp := range op.Responses {
				good = good || status < "400"
				if op.OperationID == "health" && status == "503" {
					continue // what was asked for
				}
				if status >= "400" && resp.Content[api.ProblemType].Schema["$ref"] != "#/components/schemas/Problem" {
					t.Errorf("%s: the answer %s is not a problem", where, status)
				}
			}
			if !good {
				t.Errorf("%s declares no success", where)
			}
			for _, need := range []string{"400", "500"} {
				if _, ok := op.Responses[need]; !ok {
					t.Errorf("%s does not declare %s", where, need)
				}
			}
		}
	}
	if count != len(r.h.order) {
		t.Errorf("%d operations are described, %d are served", count, len(r.h.order))
	}
}

func TestDocumentIsStable(t *testing.T) {
	t.Parallel()
	golden := filepath.Join("testdata", "openapi.json")
	got := newRig(t).h.doc
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("the OpenAPI document changed: look at the difference to %s, then run this test with -update", golden)
	}
	if again := newRig(t).h.doc; string(again) != string(got) {
		t.Error("two servers describe themselves differently")
	}
}

func TestDocsPageNamesEverything(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	resp, b := r.do("GET", "/docs", "admin", nil)
	page := string(b)
	if resp.StatusCode != 200 || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html") {
		t.Fatalf("%d %s", resp.StatusCode, resp.Header)
	}
	for _, rt := range r.h.order {
		if !strings.Contains(page, `id="`+rt.op.OperationID+`"`) || !strings.Contains(page, rt.op.Path) {
			t.Errorf("%s is not on the page", rt.op.OperationID)
		}
	}
	for _, bad := range []string{"<script", "http://", "https://", "@import", "<no value>", "ZgotmplZ"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page holds %q", bad)
		}
	}
	for _, m := range regexp.MustCompile(`href="#([^"]+)"`).FindAllStringSubmatch(page, -1) {
		if !strings.Contains(page, `id="`+m[1]+`"`) {
			t.Errorf("a link goes to %s, which is not there", m[1])
		}
	}
	if !strings.Contains(resp.Header.Get("Content-Security-Policy"), "default-src 'none'") {
		t.Error("the page has no content security policy")
	}
}

// TestADocumentedAnswerForWhatIsNotThere holds that an operation that names a record,
// in its path or as the one to go on after, is said to answer 404.
func TestADocumentedAnswerForWhatIsNotThere(t *testing.T) {
	t.Parallel()
	for _, rt := range newRig(t).h.order {
		names := strings.Contains(rt.op.Path, "{")
		for _, p := range rt.op.Parameters {
			names = names || p.Name == "after" && rt.op.OperationID != "list-workspaces" // a name, of which the next is asked
		}
		if _, said := rt.op.Responses["404"]; names && !said {
			t.Errorf("%s %s names a record, and 404 is not among its answers", rt.op.Method, rt.op.Path)
		}
	}
}
