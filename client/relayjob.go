package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"sync"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// relayMedia is the form of a job's answer that is asked for.
const relayMedia = "application/x-ndjson"

// maxRelayLine bounds one line: the largest message a relay can be configured for,
// and the words around it.
const maxRelayLine = 256<<20 + 1<<20

// RelayJob is one job on a daemon, being read. It is for one goroutine, but Close
// may be called from any.
type RelayJob struct {
	info    RelayJobInfo
	body    io.ReadCloser
	in      *bufio.Reader
	line    []byte
	outcome *RelayOutcome
	err     error // sticky

	close sync.Once
	stop  context.CancelFunc
}

// RunRelayJob hands a job to a daemon and returns when it was sent. ctx governs the
// whole job: when it ends, as when the job is closed, the server cancels the job
// and fences the daemon if that is not acknowledged. The call is never repeated
// once the server may have seen it.
func (c *Client) RunRelayJob(ctx context.Context, r RelayJobRequest) (*RelayJob, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, errdefs.Wrap(err, Invalid, "the request cannot be encoded: %v", err)
	}
	ctx, stop := context.WithCancel(ctx)
	resp, err := c.send(ctx, call{method: http.MethodPost, path: "/v1/relay/jobs", body: b, ctype: "application/json",
		accept: relayMedia + ", " + api.ProblemType})
	if err != nil {
		stop()
		return nil, err
	}
	j := &RelayJob{body: resp.Body, in: bufio.NewReaderSize(resp.Body, 64<<10), stop: stop}
	if mt, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || mt != relayMedia {
		j.Close()
		return nil, errdefs.New(Internal, "something other than a Stockade server answered: %q", resp.Header.Get("Content-Type")).
			WithNext("check the address, and any proxy on the way")
	}
	first, err := j.read()
	if err != nil || first.Type != "started" || first.Job == nil {
		j.Close()
		return nil, errdefs.Wrap(err, Indeterminate, "the answer was cut off before it said which job it is").
			WithNext("look at the daemon's jobs and fences")
	}
	j.info = *first.Job
	return j, nil
}

// Info is the job as it started.
func (j *RelayJob) Info() RelayJobInfo { return j.info }

// Next returns the next event as the daemon sent it; it may be kept. io.EOF says
// that the job is over and settled: see Outcome. Indeterminate says that the answer
// was cut off: the server then cancels the job by itself.
func (j *RelayJob) Next() (json.RawMessage, error) {
	for j.err == nil {
		l, err := j.read()
		switch {
		case err != nil:
			j.err = err
		case l.Type == "event":
			return l.Event, nil
		case l.Type == "outcome" && l.Outcome != nil:
			j.outcome, j.err = l.Outcome, io.EOF
		}
	}
	return nil, j.err
}

// Outcome is how the job ended; false before Next has said io.EOF.
func (j *RelayJob) Outcome() (RelayOutcome, bool) {
	if j.outcome == nil {
		return RelayOutcome{}, false
	}
	return *j.outcome, true
}

// Close leaves the job. A job that is not over is cancelled by the server, which
// does not wait for anybody to hear how that went: use CancelRelayJob to hear it.
func (j *RelayJob) Close() error {
	var err error
	j.close.Do(func() {
		j.stop()
		err = j.body.Close()
	})
	return err
}

func (j *RelayJob) read() (api.RelayLine, error) {
	var l api.RelayLine
	j.line = j.line[:0]
	for {
		part, err := j.in.ReadSlice('\n')
		j.line = append(j.line, part...)
		switch {
		case len(j.line) > maxRelayLine:
			return l, errdefs.New(Internal, "a line of the answer is larger than %d bytes", maxRelayLine)
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil:
			return l, errdefs.Wrap(err, Indeterminate, "the answer was cut off before the end of the job").
				WithNext("look at the daemon's jobs and fences")
		}
		break
	}
	// Most lines are events: they are cut out, not decoded.
	const head = `{"type":"event","event":`
	if raw, ok := bytes.CutPrefix(j.line, []byte(head)); ok {
		if raw, ok := bytes.CutSuffix(raw, []byte("}\n")); ok && json.Valid(raw) {
			l.Type, l.Event = "event", append(json.RawMessage(nil), raw...)
			return l, nil
		}
	}
	if err := json.Unmarshal(j.line, &l); err != nil {
		return l, errdefs.Wrap(err, Internal, "a line of the answer cannot be read: %v", err)
	}
	if cap(j.line) > 1<<20 {
		j.line = nil
	}
	return l, nil
}

// CancelRelayJob cancels a job and says how that went. It answers when the daemon
// acknowledged, or is fenced.
func (c *Client) CancelRelayJob(ctx context.Context, id string) (RelayOutcome, error) {
	return doJSON[RelayOutcome](ctx, c, call{method: http.MethodDelete, path: "/v1/relay/jobs/" + seg(id)}, nil)
}

// RelayJobs lists the jobs that are not settled, oldest first.
func (c *Client) RelayJobs(ctx context.Context) ([]RelayJobInfo, error) {
	l, err := get[List[RelayJobInfo]](ctx, c, "/v1/relay/jobs", nil)
	return l.Items, err
}

// RelayDaemons lists the daemons that are connected, by id.
func (c *Client) RelayDaemons(ctx context.Context) ([]RelayDaemon, error) {
	l, err := get[List[RelayDaemon]](ctx, c, "/v1/relay/daemons", nil)
	return l.Items, err
}

// RelayFences lists the fences of the relay with their evidence, oldest first (admin).
func (c *Client) RelayFences(ctx context.Context) ([]RelayFence, error) {
	l, err := get[List[RelayFence]](ctx, c, "/v1/relay/fences", nil)
	return l.Items, err
}

// RelayFence returns one fence, by daemon id or by the fence's key (admin).
func (c *Client) RelayFence(ctx context.Context, daemon string) (RelayFence, error) {
	return get[RelayFence](ctx, c, "/v1/relay/fences/"+seg(daemon), nil)
}

// ClearRelayFence is the statement of an operator that nothing runs on the daemon's
// machine any more (admin). It names the fence that was looked at; another one stands
// (a conflict).
func (c *Client) ClearRelayFence(ctx context.Context, daemon string, r ClearRelayFenceRequest) (RelayFence, error) {
	return doJSON[RelayFence](ctx, c, call{method: http.MethodPost, path: "/v1/relay/fences/" + seg(daemon) + "/clear"}, r)
}
