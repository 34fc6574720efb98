package runprocess

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
)

// The answers, as the Python package stockade-runner reads them. What they leave out
// of the broker's shapes (workspace, box, target, host) is the operator's.

type process struct {
	Handle     string           `json:"handle"`
	RequestID  string           `json:"request_id"`
	State      api.ProcessState `json:"state"`
	Generation int64            `json:"generation"`
	Exit       *api.Exit        `json:"exit,omitempty"`
	Cleanup    api.Cleanup      `json:"cleanup"`
	Fence      string           `json:"fence,omitempty"`
	Reason     string           `json:"reason,omitempty"`
	IO         api.IOLimits     `json:"io"`
	Stdin      api.StdinState   `json:"stdin"`
	Cursor     string           `json:"cursor"`
	CreatedAt  time.Time        `json:"created_at"`
	StartedAt  *time.Time       `json:"started_at,omitempty"`
	ExitedAt   *time.Time       `json:"exited_at,omitempty"`
	ClosedAt   *time.Time       `json:"closed_at,omitempty"`
}

func processOf(p api.Process) process {
	return process{
		Handle: p.Handle, RequestID: p.RequestID, State: p.State, Generation: p.Generation, Exit: p.Exit, Cleanup: p.Cleanup,
		Fence: p.Fence, Reason: p.Reason, IO: limitsOf(p.IO), Stdin: p.Stdin, Cursor: p.Cursor,
		CreatedAt: p.CreatedAt, StartedAt: p.StartedAt, ExitedAt: p.ExitedAt, ClosedAt: p.ClosedAt,
	}
}

// limitsOf is what one call may carry over a worker's connection.
func limitsOf(io api.IOLimits) api.IOLimits {
	least := func(have, most int64) int64 {
		if have <= 0 {
			return most
		}
		return min(have, most)
	}
	io.MaxWriteBytes = least(io.MaxWriteBytes, MaxData)
	io.MaxReadBytes = least(io.MaxReadBytes, MaxData)
	io.MaxWaitMillis = least(io.MaxWaitMillis, MaxWait.Milliseconds())
	return io
}

// Limits is what one call may carry, as a runner's context says it.
func Limits() api.IOLimits { return limitsOf(api.IOLimits{StdinWindow: MaxData}) }

type record struct {
	Stream string `json:"stream"`
	Offset int64  `json:"offset"`
	Data   []byte `json:"data_base64"`
}

type output struct {
	Records []record         `json:"records"`
	Next    string           `json:"next_cursor"`
	Oldest  string           `json:"oldest_cursor"`
	Gap     *api.Gap         `json:"gap,omitempty"`
	EOF     bool             `json:"eof"`
	State   api.ProcessState `json:"state"`
	Exit    *api.Exit        `json:"exit,omitempty"`
}

func outputOf(r api.ReadResponse) output {
	out := output{Records: make([]record, 0, len(r.Records)), Next: r.Next, Oldest: r.Oldest, Gap: r.Gap, EOF: r.EOF, State: r.State, Exit: r.Exit}
	for _, rec := range r.Records {
		out.Records = append(out.Records, record{rec.Stream, rec.Offset, rec.Data})
	}
	return out
}

type closed struct {
	Quiescent bool         `json:"quiescent"`
	Receipt   *api.Receipt `json:"receipt,omitempty"`
	Fence     *fence       `json:"fence,omitempty"`
	Process   process      `json:"process"`
}

// fence is a fence without its evidence, which tells of the machine.
type fence struct {
	ID        string    `json:"id"`
	Handle    string    `json:"handle"`
	Reason    string    `json:"reason"`
	CreatedAt time.Time `json:"created_at"`
}

func closedOf(r api.CloseResponse) closed {
	out := closed{Quiescent: r.Quiescent, Receipt: r.Receipt, Process: processOf(r.Process)}
	if f := r.Fence; f != nil {
		out.Fence = &fence{ID: f.ID, Handle: f.Handle, Reason: f.Reason, CreatedAt: f.CreatedAt}
	}
	return out
}
