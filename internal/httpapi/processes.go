package httpapi

import (
	"context"
	"net/http"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func (h *Handler) registerProcesses(b *builder) {
	type openIn struct{ Body api.OpenRequest }
	jsonOp(b, spec{id: "open-process", method: http.MethodPost, path: "/v1/processes", action: authz.ProcessOpen, tag: "processes", maxBody: maxOpen,
		summary: "Open a process",
		description: "Starts a program. The same run, request_id and arguments always answer with the same process, started once, " +
			"whatever happened to earlier answers; other arguments with the same id are a conflict. " +
			"A program that cannot be executed is not an error here: the process ends with exit kind spawn_failed.",
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Fenced, errdefs.Cancelling, errdefs.Exhausted, errdefs.Indeterminate}},
		func(ctx context.Context, p authz.Principal, in *openIn) (*answer[api.Process], error) {
			start := time.Now()
			v, err := h.cfg.Broker.Open(ctx, p, in.Body)
			// An answer with a process older than the call is a repetition.
			h.cfg.Metrics.Opened(err == nil && v.CreatedAt.Before(start.Add(-time.Millisecond)), err, time.Since(start))
			return reply(v, err)
		})
	type listIn struct {
		Run  string `query:"run" maxLength:"128" doc:"Only processes of this run."`
		Box  string `query:"box" maxLength:"128" doc:"Only processes in this box."`
		Live bool   `query:"live" doc:"Only processes that may still be running."`
		PageIn
	}
	jsonOp(b, spec{id: "list-processes", method: http.MethodGet, path: "/v1/processes", action: authz.ProcessList, tag: "processes",
		summary: "List processes", description: "Processes the credential may see: of its run, of its workspace, or all. Long arguments are cut, and receipts left out: get-process has them.",
		errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *listIn) (*answer[api.List[api.Process]], error) {
			return replyList(h.cfg.Broker.List(ctx, p, ListQuery{Run: in.Run, Box: in.Box, Live: in.Live, Limit: in.Limit, After: in.After}))
		})
	type requestIn struct {
		RequestID string `query:"request_id" required:"true" minLength:"1" maxLength:"128" doc:"The id the process was opened with."`
	}
	jsonOp(b, spec{id: "get-process-by-request", method: http.MethodGet, path: "/v1/processes/by-request", action: authz.ProcessReadByRequest, tag: "processes",
		summary: "Get a process by its request id", description: "For a caller that never learned the handle.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *requestIn) (*answer[api.Process], error) {
			return reply(h.cfg.Broker.GetByRequest(ctx, p, in.RequestID))
		})
	jsonOp(b, spec{id: "get-process", method: http.MethodGet, path: "/v1/processes/{handle}", action: authz.ProcessRead, tag: "processes",
		summary: "Get a process", description: "State, exit, clean-up, byte counts and times.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *HandleIn) (*answer[api.Process], error) {
			return reply(h.cfg.Broker.Get(ctx, p, in.Handle))
		})
	jsonOp(b, spec{id: "get-receipt", method: http.MethodGet, path: "/v1/processes/{handle}/receipt", action: authz.ProcessRead, tag: "processes",
		summary:     "Get the receipt of a process",
		description: "The signed statement that the process's tree is gone. Not found while there is none.",
		errors:      []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *HandleIn) (*answer[api.Receipt], error) {
			v, err := h.cfg.Broker.Get(ctx, p, in.Handle)
			if err != nil {
				return nil, err
			}
			if v.Receipt == nil {
				return nil, errdefs.New(errdefs.NotFound, "process %s has no receipt: its state is %s, its clean-up %s", v.Handle, v.State, v.Cleanup).
					WithNext("close the process; a receipt is given once its tree is proven gone")
			}
			return reply(*v.Receipt, nil)
		})
	type closeIn struct {
		HandleIn
		Body api.CloseRequest
	}
	jsonOp(b, spec{id: "close-process", method: http.MethodPost, path: "/v1/processes/{handle}/close", action: authz.ProcessClose, tag: "processes",
		summary: "Close a process",
		description: "SIGTERM, the grace period, SIGKILL, then proof. quiescent is true only if the kernel says that the whole tree is gone, " +
			"and comes with a receipt; otherwise a fence stands. Safe to repeat. The stop goes on if the caller goes away.",
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Indeterminate}},
		func(ctx context.Context, p authz.Principal, in *closeIn) (*answer[api.CloseResponse], error) {
			start := time.Now()
			v, err := h.cfg.Broker.Close(ctx, p, in.Handle, in.Body)
			h.cfg.Metrics.Closed(v.Quiescent, err, time.Since(start))
			return reply(v, err)
		})
	type closeByIn struct{ Body api.CloseByRequest }
	jsonOp(b, spec{id: "close-process-by-request", method: http.MethodPost, path: "/v1/processes/close", action: authz.ProcessCloseByRequest, tag: "processes",
		summary:     "Close a process by its request id",
		description: "Like close, for a caller that never learned the handle. If nothing was opened with the id, it is forbidden for ever that something is.",
		errors:      []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Indeterminate}},
		func(ctx context.Context, p authz.Principal, in *closeByIn) (*answer[api.CloseResponse], error) {
			start := time.Now()
			v, err := h.cfg.Broker.CloseByRequest(ctx, p, in.Body)
			h.cfg.Metrics.Closed(v.Quiescent, err, time.Since(start))
			return reply(v, err)
		})
	type signalIn struct {
		HandleIn
		Body api.SignalRequest
	}
	jsonOp(b, spec{id: "signal-process", method: http.MethodPost, path: "/v1/processes/{handle}/signal", action: authz.ProcessSignal, tag: "processes",
		summary: "Send a polite signal", description: "To the program's process group. Not safe to repeat: each call is a signal.",
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Cancelling, errdefs.Indeterminate}},
		func(ctx context.Context, p authz.Principal, in *signalIn) (*nothing, error) {
			return nil, h.cfg.Broker.Signal(ctx, p, in.Handle, in.Body.Signal)
		})
	type resizeIn struct {
		HandleIn
		Body api.Winsize
	}
	jsonOp(b, spec{id: "resize-process", method: http.MethodPost, path: "/v1/processes/{handle}/resize", action: authz.ProcessResize, tag: "processes",
		summary: "Resize the terminal", description: "A conflict if the process has no terminal.",
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Cancelling}},
		func(ctx context.Context, p authz.Principal, in *resizeIn) (*nothing, error) {
			return nil, h.cfg.Broker.Resize(ctx, p, in.Handle, in.Body)
		})
	type ackIn struct {
		HandleIn
		Cursor string `query:"cursor" required:"true" minLength:"1" maxLength:"64" doc:"Everything before it was received."`
	}
	jsonOp(b, spec{id: "ack-output", method: http.MethodPost, path: "/v1/processes/{handle}/ack", action: authz.ProcessAck, tag: "processes",
		summary:     "Acknowledge output",
		description: "Output before the cursor may be dropped when the log is at its cap. With overflow block this is what lets a waiting child go on. Safe to repeat.",
		errors:      []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *ackIn) (*nothing, error) {
			return nil, h.cfg.Broker.Ack(ctx, p, in.Handle, in.Cursor)
		})
}
