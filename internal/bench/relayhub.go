package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relay"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// The bench drives a hub in a process of its own by lines on its standard input and
// output, so that its time and memory are its own. relay_hub.py answers the same.

// hubAsk is one request to a hub process.
type hubAsk struct {
	ID      int          `json:"id"`
	Op      string       `json:"op"` // jobs, repeat, cancel, stall, flood, unstall, tool
	Daemons []string     `json:"daemons"`
	Payload relayPayload `json:"payload"`
	N       int          `json:"n"`
}

// hubReply answers one request. Times are in seconds.
type hubReply struct {
	ID     int       `json:"id"`
	Error  string    `json:"error,omitempty"`
	URL    string    `json:"url,omitempty"` // of the first line
	Took   float64   `json:"took"`
	Events int64     `json:"events"`
	Bytes  int64     `json:"bytes"`
	Ends   []float64 `json:"ends,omitempty"`   // when each job ended, since the request
	Times  []float64 `json:"times,omitempty"`  // of what was repeated
	Fenced int       `json:"fenced,omitempty"` // daemons that are fenced at the end
}

// RelayHubConfig says how ServeRelayHub runs the hub.
type RelayHubConfig struct {
	StateDir string
	Token    string
	ToolTime time.Duration // how long each tool call takes
}

// ServeRelayHub runs our hub for the bench until in ends: what "stockade bench
// relay-hub" is.
func ServeRelayHub(ctx context.Context, cfg RelayHubConfig, in io.Reader, out io.Writer) error {
	hub, err := relay.NewHub(relay.HubConfig{Token: cfg.Token, StateDir: cfg.StateDir,
		Limits: relaywire.Limits{Daemons: 20000, Jobs: 20000}})
	if err != nil {
		return err
	}
	defer hub.Stop(context.WithoutCancel(ctx))
	url, err := hub.Start(ctx, relay.Endpoint{Token: cfg.Token})
	if err != nil {
		return err
	}
	s := &hubServer{hub: hub, tools: slowTools(cfg.ToolTime), out: json.NewEncoder(out), stalled: make(chan *relay.Job, 16)}
	s.reply(hubReply{URL: url})
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 64<<20)
	var asks sync.WaitGroup
	defer s.readers.Wait()
	defer asks.Wait()
	for lines.Scan() {
		var ask hubAsk
		if err := json.Unmarshal(lines.Bytes(), &ask); err != nil {
			return errdefs.Wrap(err, errdefs.Invalid, "not a request: %v", err)
		}
		asks.Add(1)
		go func() {
			defer asks.Done()
			r, err := s.do(ctx, ask)
			if r.ID = ask.ID; err != nil {
				r.Error = err.Error()
			}
			s.reply(r)
		}()
	}
	return lines.Err()
}

type hubServer struct {
	hub     *relay.Hub
	tools   relay.Tools
	stalled chan *relay.Job
	readers sync.WaitGroup

	mu  sync.Mutex
	out *json.Encoder
}

func (s *hubServer) reply(r hubReply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.out.Encode(r) // whoever asked is gone
}

func (s *hubServer) do(ctx context.Context, ask hubAsk) (r hubReply, err error) {
	payload, err := json.Marshal(ask.Payload)
	if err != nil {
		return r, err
	}
	start := time.Now()
	defer func() { r.Took = time.Since(start).Seconds() }()
	switch ask.Op {
	case "jobs":
		return s.jobs(ctx, ask.Daemons, payload)
	case "repeat":
		for range ask.N {
			if _, _, err := s.follow(ctx, ask.Daemons[0], payload); err != nil {
				return r, err
			}
		}
		return r, nil
	case "cancel":
		for range ask.N {
			job, err := s.begin(ctx, ask.Daemons[0], payload)
			if err != nil {
				return r, err
			}
			at := time.Now()
			o, err := job.Cancel(ctx, "bench")
			if err != nil || !o.Acknowledged {
				return r, errdefs.Wrap(err, errdefs.Internal, "a cancel was not acknowledged")
			}
			r.Times = append(r.Times, time.Since(at).Seconds())
		}
		return r, nil
	case "stall":
		job, err := s.begin(ctx, ask.Daemons[0], payload)
		if err == nil {
			s.stalled <- job
		}
		return r, err
	case "flood": // like stall, but it is read, until unstall
		job, err := s.begin(ctx, ask.Daemons[0], payload)
		if err != nil {
			return r, err
		}
		s.stalled <- job
		s.readers.Go(func() {
			_ = job.Stream(ctx, func([]json.RawMessage) error { return nil }) // ends with its cancel
		})
		return r, nil
	case "unstall":
		job := <-s.stalled
		_, err := job.Cancel(ctx, "bench")
		return r, err
	case "tool":
		return s.besideTools(ctx, ask.Daemons)
	}
	return r, errdefs.New(errdefs.Invalid, "no such op: %s", ask.Op)
}

// begin runs a job and waits for its first event.
func (s *hubServer) begin(ctx context.Context, daemon string, payload json.RawMessage) (*relay.Job, error) {
	job, err := s.hub.RunJob(ctx, relay.JobRequest{DaemonID: daemon, Payload: payload, Tools: s.tools})
	if err != nil {
		return nil, err
	}
	_, err = job.Next(ctx)
	return job, err
}

// follow runs a job to its end and looks at every event.
func (s *hubServer) follow(ctx context.Context, daemon string, payload json.RawMessage) (events, bytes int64, err error) {
	job, err := s.hub.RunJob(ctx, relay.JobRequest{DaemonID: daemon, Payload: payload, Tools: s.tools})
	if err != nil {
		return 0, 0, err
	}
	err = job.Stream(ctx, func(all []json.RawMessage) error {
		for _, e := range all {
			events++
			bytes += int64(len(e))
		}
		return nil
	})
	if o := job.Outcome(); err == nil && !o.Acknowledged {
		err = errdefs.New(errdefs.Internal, "a job was not acknowledged: %s", o.Cause)
	}
	return events, bytes, err
}

func (s *hubServer) jobs(ctx context.Context, daemons []string, payload json.RawMessage) (hubReply, error) {
	r := hubReply{Ends: make([]float64, len(daemons))}
	start := time.Now()
	var mu sync.Mutex
	err := parallel(len(daemons), func(i int) error {
		events, bytes, err := s.follow(ctx, daemons[i], payload)
		mu.Lock()
		defer mu.Unlock()
		r.Ends[i] = time.Since(start).Seconds()
		r.Events += events
		r.Bytes += bytes
		return err
	})
	r.Took = time.Since(start).Seconds()
	return r, err
}

// besideTools cancels a job on each daemon while another job there waits for a slow
// tool, and counts the daemons that were fenced for it.
func (s *hubServer) besideTools(ctx context.Context, daemons []string) (hubReply, error) {
	var r hubReply
	slow, _ := json.Marshal(relayPayload{Events: 1, Hold: true, Tool: true})
	plain, _ := json.Marshal(relayPayload{Events: 1, Hold: true})
	var mu sync.Mutex
	err := parallel(len(daemons), func(i int) error {
		// The plain job first: a hub that reads nothing while it calls a tool would
		// not even see that it runs.
		other, err := s.begin(ctx, daemons[i], plain)
		if err != nil {
			return err
		}
		calling, err := s.hub.RunJob(ctx, relay.JobRequest{DaemonID: daemons[i], Payload: slow, Tools: s.tools})
		if err != nil {
			return err
		}
		time.Sleep(500 * time.Millisecond) // the call is on its way; a hub that blocks gives no sign to wait for
		o, err := other.Cancel(ctx, "bench")
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if o.Fence != nil {
			r.Fenced++
		}
		_, err = calling.Cancel(ctx, "bench")
		return err
	})
	return r, err
}

// slowTools answers each call after so long.
type slowTools time.Duration

func (t slowTools) Call(ctx context.Context, _ json.RawMessage) (json.RawMessage, error) {
	timer := time.NewTimer(time.Duration(t))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-timer.C:
		return json.RawMessage(`{"jsonrpc":"2.0","id":7,"result":{}}`), nil
	}
}
