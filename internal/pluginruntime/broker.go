package pluginruntime

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/runprocess"
)

// brokerRetry is how long one call to the broker is repeated here. What lasts longer
// is the runner's to repeat: the broker's restart takes about that long.
const brokerRetry = 2 * time.Second

// validateBroker says what is wrong with how processes are granted to runners.
func (c Config) validateBroker() error {
	for _, p := range c.RunnerProcess {
		author, name, ok := strings.Cut(p, "/")
		if p != runprocess.All && (!ok || author == "" || name == "" || strings.Contains(name, "/")) {
			return errdefs.New(errdefs.Invalid, "--runner-process %q is neither AUTHOR/NAME nor %s", p, runprocess.All)
		}
	}
	switch {
	case len(c.RunnerProcess) > 0 && c.BrokerURL == "":
		return errdefs.New(errdefs.Invalid, "--runner-process grants processes, and there is no broker that runs them").
			WithNext("name the address of stockade serve with --broker-url, and a workspace key with --broker-key-file")
	case c.BrokerURL != "" && c.BrokerKeyFile == "":
		return errdefs.New(errdefs.Invalid, "--broker-url is set, and there is no key for it").
			WithNext("name a file with a workspace key with --broker-key-file, such as default.key in the server's state directory")
	case c.BrokerKeyFile != "" && c.BrokerURL == "":
		return errdefs.New(errdefs.Invalid, "--broker-key-file is set, and --broker-url is not")
	}
	return nil
}

// processes makes the keeper of runs, nil where nothing is granted. It does not
// connect: the broker may come later.
func (c Config) processes(version string, log *slog.Logger) (*runprocess.Keeper, error) {
	if len(c.RunnerProcess) == 0 {
		return nil, nil
	}
	b, err := client.New(client.Config{URL: c.BrokerURL, KeyFile: c.BrokerKeyFile, RetryFor: brokerRetry, UserAgent: "stockade-runtime/" + version})
	if err != nil {
		return nil, err
	}
	log.Info("runners may have processes", "plugins", slices.Clone(c.RunnerProcess), "broker", b.URL())
	return runprocess.New(runprocess.Config{Broker: broker{b}, Plugins: c.RunnerProcess, Target: c.BrokerTarget, Logger: log}), nil
}

// broker is a client as the keeper of runs asks it.
type broker struct{ *client.Client }

func (b broker) BeginRun(ctx context.Context, r api.RunRequest) (api.Run, runprocess.Processes, error) {
	out, err := b.CreateRun(ctx, r)
	if err != nil {
		return api.Run{}, nil, err
	}
	return out.Run, ofRun{b.WithKey(out.Token)}, nil
}

// ofRun is a client with the token of a run.
type ofRun struct{ c *client.Client }

func (p ofRun) Open(ctx context.Context, r api.OpenRequest) (api.Process, error) {
	out, err := p.c.Open(ctx, r)
	if err != nil {
		return api.Process{}, err
	}
	return out.Info(), nil
}

func (p ofRun) Write(ctx context.Context, handle string, offset int64, data []byte, eof bool) (api.StdinState, error) {
	return p.c.Process(handle).Write(ctx, offset, data, eof)
}

func (p ofRun) Read(ctx context.Context, handle string, r runprocess.Read) (api.ReadResponse, error) {
	return p.c.Process(handle).Read(ctx, client.ReadOptions{Cursor: r.Cursor, MaxBytes: r.MaxBytes, Wait: r.Wait, Ack: r.Ack})
}

func (p ofRun) Get(ctx context.Context, n runprocess.Name) (api.Process, error) {
	if n.Handle != "" {
		return p.c.Process(n.Handle).Get(ctx)
	}
	out, err := p.c.ProcessByRequest(ctx, n.RequestID)
	if err != nil {
		return api.Process{}, err
	}
	return out.Info(), nil
}

func (p ofRun) Close(ctx context.Context, n runprocess.Name, r api.CloseRequest) (api.CloseResponse, error) {
	if n.Handle != "" {
		return p.c.Process(n.Handle).Close(ctx, r)
	}
	return p.c.CloseByRequest(ctx, api.CloseByRequest{RequestID: n.RequestID, CloseRequest: r})
}
