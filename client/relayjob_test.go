package client_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/client"
)

// relayAnswer is a server that answers every job with the same bytes.
func relayAnswer(t *testing.T, media, body string) *client.Client {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", media)
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(srv.Close)
	c, err := client.New(client.Config{URL: srv.URL, Key: "k", RetryFor: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	return c
}

const (
	lineStarted = `{"type":"started","job":{"job_id":"J","daemon_id":"laptop"}}` + "\n"
	lineOutcome = `{"type":"outcome","outcome":{"acknowledged":true}}` + "\n"
)

func TestRelayJobIsRead(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("x", 3<<20)
	c := relayAnswer(t, "application/x-ndjson", lineStarted+
		`{"type":"event","event":{"a":1}}`+"\n"+
		`{"type":"alive"}`+"\n"+
		`{"type":"nonsense from a newer server"}`+"\n"+
		`{ "event" : {"b":"`+big+`"}, "type":"event" }`+"\n"+
		`{"type":"event","event":{"c":"`+big+`"}}`+"\n"+lineOutcome+"never read\n")
	job, err := c.RunRelayJob(t.Context(), client.RelayJobRequest{DaemonID: "laptop", Payload: []byte(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	if job.Info().ID != "J" {
		t.Errorf("%+v", job.Info())
	}
	var got []string
	for {
		e, err := job.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(e))
	}
	if len(got) != 3 || got[0] != `{"a":1}` || got[1] != `{"b":"`+big+`"}` || got[2] != `{"c":"`+big+`"}` {
		t.Errorf("%d events: %.40s", len(got), got)
	}
	if o, ok := job.Outcome(); !ok || !o.Acknowledged {
		t.Errorf("%+v %v", o, ok)
	}
	if _, err := job.Next(); err != io.EOF {
		t.Errorf("%v", err)
	}
}

// TestRelayJobThatIsCutOffIsNoSuccess: only a line of type outcome is an end.
func TestRelayJobThatIsCutOffIsNoSuccess(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		body string
		want client.Code
	}{
		"at an event":       {lineStarted + `{"type":"event","event":{"a":`, client.Indeterminate},
		"after an event":    {lineStarted + `{"type":"event","event":{}}` + "\n", client.Indeterminate},
		"outcome half":      {lineStarted + `{"type":"outcome","outcome":{"acknowledged":true}}`, client.Indeterminate},
		"not JSON":          {lineStarted + "hello\n", client.Internal},
		"an event in parts": {lineStarted + `{"type":"event","event":{}},{"type":"outcome"}` + "\n", client.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := relayAnswer(t, "application/x-ndjson", tc.body)
			job, err := c.RunRelayJob(t.Context(), client.RelayJobRequest{DaemonID: "laptop"})
			if err != nil {
				t.Fatal(err)
			}
			defer job.Close()
			for err == nil {
				_, err = job.Next()
			}
			if client.CodeOf(err) != tc.want {
				t.Errorf("%v", err)
			}
			if o, ok := job.Outcome(); ok {
				t.Errorf("an outcome: %+v", o)
			}
		})
	}
	for name, tc := range map[string]struct{ media, body string }{
		"HTML":          {"text/html", "<html>"},
		"nothing":       {"application/x-ndjson", ""},
		"another first": {"application/x-ndjson", lineOutcome},
		"no job":        {"application/x-ndjson", `{"type":"started"}` + "\n"},
	} {
		c := relayAnswer(t, tc.media, tc.body)
		if job, err := c.RunRelayJob(t.Context(), client.RelayJobRequest{DaemonID: "laptop"}); err == nil {
			job.Close()
			t.Errorf("%s is taken for a job", name)
		}
	}
}

// TestRelayJobIsNotSentTwice: an answer that was lost is not asked for again.
func TestRelayJobIsNotSentTwice(t *testing.T) {
	t.Parallel()
	seen := make(chan struct{}, 10)
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		seen <- struct{}{}
		panic(http.ErrAbortHandler)
	}))
	defer srv.Close()
	c, err := client.New(client.Config{URL: srv.URL, Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseIdle()
	if _, err := c.RunRelayJob(t.Context(), client.RelayJobRequest{DaemonID: "laptop"}); err == nil {
		t.Error("no error")
	}
	if len(seen) != 1 {
		t.Errorf("sent %d times", len(seen))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.RunRelayJob(ctx, client.RelayJobRequest{}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
