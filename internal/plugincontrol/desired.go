package plugincontrol

import (
	"context"
	"encoding/json"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

func ping(context.Context, *session, *rpc.Inbound) (any, error) {
	return json.RawMessage(`{"message":"pong"}`), nil
}

// fileChunk takes a piece of a file under the context it was admitted with. A
// candidate's package does not make the candidate current.
func fileChunk(_ context.Context, s *session, in *rpc.Inbound) (any, error) {
	if err := s.files.Chunk(in.Data, in.Context); err != nil {
		return nil, err
	}
	return empty, nil
}

// setRuntimeConfig fixes who the runtime works for, once for the process; on each
// connection it is what opens it.
func setRuntimeConfig(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	cfg, err := pluginwire.DecodeRuntimeConfig(in.Data)
	if err != nil {
		return nil, err
	}
	c := s.control
	if err := c.cfg.Manager.Configure(ctx, cfg); err != nil {
		return nil, err
	}
	if c.first.CompareAndSwap(false, true) {
		c.log.Info("configured by LangBot", "profile", string(cfg.Profile), "hard_limits", cfg.Policy.RequireHardLimits,
			"max_workers", cfg.Policy.MaxWorkers)
	} else if !s.configured.Load() {
		c.log.Info("LangBot is connected again")
	}
	if c.cfg.Configured != nil {
		c.cfg.Configured(cfg)
	}
	s.configured.Store(true)
	c.cfg.Link.ready()
	return empty, nil
}

func reconcile(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	states, err := pluginwire.DecodeReconcile(in.Data)
	if err != nil {
		return nil, err
	}
	defer s.sweep()
	return s.control.cfg.Manager.Reconcile(ctx, states)
}

// sweep removes what LangBot pushed for bindings that are fenced now.
func (s *session) sweep() {
	if err := s.files.Sweep(); err != nil {
		s.control.log.Warn("files of a fenced binding stay until the connection ends", "err", err)
	}
}

// apply reads the pushed package and deletes it before anything is changed: a
// failed apply needs the package anew.
func apply(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	defer s.discard(in, "", "artifact_file_key")
	req, err := pluginwire.DecodeApply(in.Data)
	if err != nil {
		return nil, err
	}
	var archive []byte
	if req.ArtifactFileKey != "" {
		if archive, err = s.take(req.ArtifactFileKey, in.Context); err != nil {
			return nil, err
		}
	}
	defer s.sweep()
	return s.control.cfg.Manager.Apply(ctx, in.Context, archive, req)
}

func remove(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	if err := pluginwire.DecodeRemove(in.Data); err != nil {
		return nil, err
	}
	defer s.sweep()
	return s.control.cfg.Manager.Remove(ctx, in.Context)
}

// take returns what LangBot pushed under a key, and deletes it. Whose binding was fenced
// since the request was admitted, and its files swept with it, is told that.
func (s *session) take(key string, as pluginwire.Context) ([]byte, error) {
	data, err := s.control.cfg.Transfers.Read(key, as)
	if err != nil {
		if fenced := s.mayPush(as); fenced != nil {
			return nil, fenced
		}
		return nil, err
	}
	return data, s.control.cfg.Transfers.Delete(key, as)
}

// discard deletes what LangBot pushed for a request, however that ended: also where it
// was refused before the file was looked at, nobody asks for it again, and an owner may
// have so many. The key is a field of the data, or of the object in it that within names.
func (s *session) discard(in *rpc.Inbound, within, name string) {
	o, err := payload(in)
	if err != nil {
		return
	}
	if within != "" {
		o = o.within(within)
	}
	key := o.textOr(name, "")
	if key == "" {
		return
	}
	// A key that is none was refused with the request.
	if err := s.control.cfg.Transfers.Delete(key, in.Context); err != nil && !errdefs.Is(err, errdefs.Invalid) {
		s.control.log.Warn("a file from LangBot stays until the connection ends", "err", err)
	}
}
