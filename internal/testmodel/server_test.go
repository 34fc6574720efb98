package testmodel

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }

var script = []Turn{
	{Text: "I look at it – first.", Call: &Call{Read: "/w/a b.sh"}},
	{Call: &Call{Edit: &Edit{Path: "/w/a b.sh", Old: "1", New: "2"}}},
	{Text: "Done."},
}

func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	s, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	return s
}

// post returns the events of an answer.
func post(t *testing.T, s *Server, path, body string) []map[string]any {
	t.Helper()
	res, err := http.Post(s.URL()+path, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != 200 {
		t.Fatalf("%s: status %d", path, res.StatusCode)
	}
	var out []map[string]any
	sc := bufio.NewScanner(res.Body)
	var kind string
	for sc.Scan() {
		if k, ok := strings.CutPrefix(sc.Text(), "event: "); ok {
			kind = k
		}
		if d, ok := strings.CutPrefix(sc.Text(), "data: "); ok {
			var e map[string]any
			if err := json.Unmarshal([]byte(d), &e); err != nil || e["type"] != kind {
				t.Fatalf("event %s: %s", kind, d)
			}
			out = append(out, e)
		}
	}
	return out
}

// find returns the compact JSON of the events of a type.
func find(events []map[string]any, kind string) string {
	var b strings.Builder
	for _, e := range events {
		if e["type"] == kind {
			j, _ := json.Marshal(e)
			b.Write(j)
		}
	}
	return b.String()
}

func TestResponses(t *testing.T) {
	t.Parallel()
	s := start(t, Config{Script: script})
	tools := `"tools":[{"type":"function","name":"exec_command"},{"type":"web_search"}]`
	first := `{"model":"m","input":[{"type":"message"}],` + tools + `}`
	for range 2 { // the same question has the same answer
		ev := post(t, s, "/v1/responses", first)
		done := find(ev, "response.output_item.done")
		if !strings.Contains(done, "I look at it – first.") || !strings.Contains(done, `cat '/w/a b.sh'`) || !strings.Contains(done, `"call_id":"call_0"`) {
			t.Errorf("first turn: %s", done)
		}
		if n := strings.Count(find(ev, "response.output_text.delta"), "delta\":"); n != 2 {
			t.Errorf("%d pieces", n)
		}
	}
	second := `{"input":[{"type":"message"},{"type":"function_call"},{"type":"function_call_output","output":"text"}],` + tools + `}`
	if done := find(post(t, s, "/v1/responses", second), "response.output_item.done"); !strings.Contains(done, `sed -i -e 's/1/2/' '/w/a b.sh'`) {
		t.Errorf("second turn: %s", done)
	}
	reqs := s.Requests()
	if len(reqs) != 3 || reqs[1].Turn != 0 || reqs[2].Turn != 1 || strings.Join(reqs[2].Outputs, "|") != "text" || strings.Join(reqs[2].Tools, "|") != "exec_command" {
		t.Errorf("recorded %+v", reqs)
	}
}

func TestMessages(t *testing.T) {
	t.Parallel()
	s := start(t, Config{Script: script, Piece: 1000})
	tools := `"tools":[{"name":"Bash"},{"name":"Read"},{"name":"Edit"}]`
	ev := post(t, s, "/v1/messages?beta=true", `{"stream":true,"messages":[{"content":"hi"}],`+tools+`}`)
	if got := find(ev, "content_block_delta"); !strings.Contains(got, `{\"file_path\":\"/w/a b.sh\"}`) || !strings.Contains(find(ev, "message_delta"), `"stop_reason":"tool_use"`) {
		t.Errorf("first turn: %s", got)
	}
	results := `{"content":[{"type":"tool_result","content":"one"}]},{"content":[{"type":"tool_result","content":[{"type":"text","text":"two"}]}]}`
	ev = post(t, s, "/v1/messages", `{"stream":true,"messages":[`+results+`],`+tools+`}`)
	if got := find(ev, "content_block_delta"); !strings.Contains(got, "Done.") || !strings.Contains(find(ev, "message_delta"), "end_turn") {
		t.Errorf("last turn: %s", got)
	}
	// An errand without tools does not use up a turn.
	if got := find(post(t, s, "/v1/messages", `{"stream":true,"messages":[]}`), "content_block_delta"); !strings.Contains(got, "Working") {
		t.Errorf("errand: %s", got)
	}
	reqs := s.Requests()
	if strings.Join(reqs[1].Outputs, "|") != "one|two" || reqs[1].Turn != 2 || reqs[2].Turn != -1 {
		t.Errorf("recorded %+v", reqs)
	}
	// Not as a stream, as after one that broke off.
	res, err := http.Post(s.URL()+"/v1/messages", "application/json", strings.NewReader(`{"messages":[{"content":"hi"}],`+tools+`}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if got := string(b); err != nil || !json.Valid(b) || !strings.Contains(got, `"input":{"file_path":"/w/a b.sh"}`) || !strings.Contains(got, `"stop_reason":"tool_use"`) {
		t.Errorf("as a whole: %s, %v", got, err)
	}
}

func TestCredential(t *testing.T) {
	t.Parallel()
	s := start(t, Config{Key: "right"})
	for header, want := range map[string]int{"": 401, "Authorization: Bearer wrong": 401, "Authorization: Bearer right": 200, "X-Api-Key: right": 200} {
		req, _ := http.NewRequest(http.MethodGet, s.URL()+"/v1/models", nil)
		if k, v, ok := strings.Cut(header, ": "); ok {
			req.Header.Set(k, v)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("%q: %d, want %d", header, res.StatusCode, want)
		}
	}
	res, err := http.Head(s.URL() + "/")
	if err != nil || res.StatusCode != 200 {
		t.Fatalf("HEAD: %v %v", res, err)
	}
	res.Body.Close()
	res, err = http.Post(s.URL()+"/v1/responses", "", strings.NewReader("{"))
	if err != nil || res.StatusCode != 401 {
		t.Fatalf("without a key: %v %v", res, err)
	}
	res.Body.Close()
}

func TestHold(t *testing.T) {
	t.Parallel()
	asked, release := make(chan int, 1), make(chan struct{})
	s := start(t, Config{Script: script, Hold: func(turn int) <-chan struct{} { asked <- turn; return release }})
	body := `{"input":[],"tools":[{"type":"function","name":"shell"}]}`

	// A client that goes away while it is held holds nothing up.
	ctx, cancel := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/responses", strings.NewReader(body))
	gone := make(chan error, 1)
	go func() {
		res, err := http.DefaultClient.Do(req)
		if err == nil {
			res.Body.Close()
		}
		gone <- err
	}()
	<-asked
	cancel()
	if err := <-gone; err == nil {
		t.Error("an answer came although it was held")
	}
	close(release)
	if done := find(post(t, s, "/v1/responses", body), "response.output_item.done"); !strings.Contains(done, `[\"sh\",\"-c\"`) {
		t.Errorf("answer: %s", done)
	}
}

// An edit said as a command line does what the edit says, whatever it holds.
func TestEditAsShell(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "it's a file")
	chars := rapid.StringOfN(rapid.RuneFrom([]rune(`ab/\.*[]^$&'"+?(){}| `)), 1, 12, -1)
	rapid.Check(t, func(t *rapid.T) {
		old, new := chars.Draw(t, "old"), chars.Draw(t, "new")
		before := "first\n<<" + old + ">>\nlast\n"
		if err := os.WriteFile(file, []byte(before), 0o600); err != nil {
			t.Fatal(err)
		}
		line := (&Call{Edit: &Edit{Path: file, Old: "<<" + old + ">>", New: new}}).shellLine()
		if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v %s", line, err, out)
		}
		got, err := os.ReadFile(file)
		if err != nil || string(got) != "first\n"+new+"\nlast\n" {
			t.Fatalf("%s: %q became %q", line, before, got)
		}
	})
}

func TestPieces(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.String().Draw(t, "s")
		parts := pieces(s, rapid.IntRange(1, 20).Draw(t, "n"))
		if strings.Join(parts, "") != s {
			t.Fatalf("%q became %q", s, parts)
		}
		for _, p := range parts {
			if strings.ToValidUTF8(p, "?") != p {
				t.Fatalf("a rune of %q was cut: %q", s, parts)
			}
		}
	})
}
