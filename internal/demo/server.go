package demo

import "github.com/stockade-run/stockade/internal/serverproc"

// newServer says how the demo's server is run. Nothing of the user's own
// settings reaches it: the demo shows the defaults.
func newServer(s *story) (*serverproc.Server, error) {
	cfg := serverproc.Config{Exe: s.cfg.Stockade, StateDir: s.dir, Args: []string{"--log-level", "debug"}}
	if s.cfg.HostBinary != "" {
		cfg.Args = append(cfg.Args, "--host-program", s.cfg.HostBinary)
	}
	if s.toolArg != "" {
		cfg.Args = append(cfg.Args, "--host-tools", s.toolArg)
	}
	if s.model != nil {
		cfg.Args = append(cfg.Args, "--models", s.model.entry)
		if s.model.env != "" {
			cfg.Env = append(cfg.Env, s.model.env+"="+s.cfg.Env(s.model.env))
		}
	}
	return serverproc.New(cfg)
}
