package plugincontrol

import (
	"context"
	"errors"
	"io"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// executeCommand runs a command and passes what it says on, frame by frame. A
// command that nobody has says nothing: LangBot has looked it up before.
func executeCommand(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	cmd, err := o.object("command_context")
	if err != nil {
		return nil, err
	}
	name, err := cmd.text("command")
	if err != nil {
		return nil, err
	}
	f, err := o.include()
	if err != nil {
		return nil, err
	}
	if cmd, err = claimCommand(cmd, in.Context); err != nil {
		return nil, err
	}
	in.BeginStream()
	p, ok := s.control.owner(in.Context, f, KindCommand, name)
	if !ok {
		return nil, nil
	}
	stream, err := p.Stream(ctx, pluginwire.ActionExecuteCommand, build(field("command_context", cmd.raw)),
		pluginwire.WorkerTimeout(pluginwire.ActionExecuteCommand))
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	for {
		raw, err := stream.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		frame, err := readObject(raw, "the command's answer")
		if err != nil {
			return nil, err
		}
		answer, err := frame.object("command_response")
		if err != nil {
			return nil, err
		}
		if err := in.Send(ctx, answer.raw); err != nil {
			return nil, err
		}
	}
}

// claimCommand writes the request's scope into a command and its session, neither
// of which may claim another.
func claimCommand(cmd object, scope pluginwire.Context) (object, error) {
	set, err := cmd.scope(scope, "command_context")
	if err != nil {
		return object{}, err
	}
	if cmd.has("session") {
		sess, err := cmd.object("session")
		if err != nil {
			return object{}, err
		}
		inner, err := sess.scope(scope, "command_context.session")
		if err != nil {
			return object{}, err
		}
		if sess, err = sess.with(inner...); err != nil {
			return object{}, err
		}
		set = append(set, field("session", sess.raw))
	}
	return cmd.with(set...)
}
