package relay_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"strings"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/client/relay"
)

// clock is the tools of one job: it answers every call with the time.
type clock struct{}

func (clock) Call(_ context.Context, payload json.RawMessage) (json.RawMessage, error) {
	var call struct {
		ID json.RawMessage `json:"id"`
	}
	if err := json.Unmarshal(payload, &call); err != nil || call.ID == nil {
		return nil, nil // a notification wants no answer
	}
	return fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%s,"result":{"content":[{"type":"text","text":"noon"}]}}`, call.ID), nil
}

// A program embeds the hub, hands a job to a daemon that connected, and gives it
// tools of its own.
func Example() {
	ctx := context.Background()
	hub, err := relay.New(relay.Config{Token: "a token that the daemon knows"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer hub.Stop(ctx)
	server := httptest.NewServer(hub) // in a program: hub.Start, or a route of its own
	defer server.Close()
	go daemon(ctx, server.URL) // in life: stockade-host relay-connect on a user's machine

	if err := hub.WaitForDaemon(ctx, "laptop", 0); err != nil {
		fmt.Println(err)
		return
	}
	job, err := hub.RunJob(ctx, relay.JobRequest{DaemonID: "laptop", Payload: json.RawMessage(`{"prompt":"what time is it?"}`), Tools: clock{}})
	if err != nil {
		fmt.Println(err)
		return
	}
	for {
		event, err := job.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			fmt.Println(err)
			break
		}
		fmt.Println(string(event))
	}
	fmt.Println("acknowledged:", job.Outcome().Acknowledged)

	_, err = hub.RunJob(ctx, relay.JobRequest{DaemonID: "desktop", Payload: json.RawMessage(`{}`)})
	fmt.Println(relay.CodeOf(err), relay.Is(err, relay.CodeOffline))

	// Output:
	// {"type":"message.completed","data":{"message":{"role":"assistant","content":"noon"}}}
	// acknowledged: true
	// relay.daemon_offline true
}

// daemon is one that asks the job's tools for the time and repeats what they say.
func daemon(ctx context.Context, url string) {
	ws, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(url, "http"), nil)
	if err != nil {
		return
	}
	defer ws.CloseNow()
	say := func(format string, args ...any) {
		_ = ws.Write(ctx, websocket.MessageText, fmt.Appendf(nil, format, args...)) // Read sees a lost connection
	}
	say(`{"type":"daemon.hello","daemon_id":"laptop","protocol":"coding-relay-v1","token":"a token that the daemon knows"}`)
	for {
		_, b, err := ws.Read(ctx)
		if err != nil {
			return
		}
		var f struct {
			Type    string `json:"type"`
			JobID   string `json:"job_id"`
			Payload struct {
				Result struct {
					Content []struct {
						Text string `json:"text"`
					} `json:"content"`
				} `json:"result"`
			} `json:"payload"`
		}
		if json.Unmarshal(b, &f) != nil {
			return
		}
		switch f.Type {
		case "run.start":
			say(`{"type":"mcp.request","job_id":%q,"request_id":"1","payload":{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"time"}}}`, f.JobID)
		case "mcp.response":
			text := f.Payload.Result.Content[0].Text
			say(`{"type":"run.event","job_id":%q,"event":{"type":"message.completed","data":{"message":{"role":"assistant","content":%q}}}}`, f.JobID, text)
			say(`{"type":"run.finished","job_id":%q}`, f.JobID)
		case "run.cancel":
			say(`{"type":"run.finished","job_id":%q}`, f.JobID)
		}
	}
}
