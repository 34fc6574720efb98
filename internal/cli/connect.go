package cli

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/config"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/server"
)

// The key files of a state directory, by what a command needs.
const (
	tenantKey   = "default.key"
	operatorKey = "admin.key"
)

// connect makes the client of a command: to the server named by --url, or the one
// that runs on the state directory, with the key given, or the state directory's
// key of the kind the command needs.
func (a *app) connect(keyName string) (*client.Client, error) {
	state := config.DefaultStateDir()
	cfg := client.Config{URL: a.url, OnSilence: a.silence, Key: os.Getenv("STOCKADE_KEY"), KeyFile: a.keyFile, UserAgent: "stockade-cli/" + a.Version}
	if cfg.URL == "" {
		b, err := os.ReadFile(filepath.Join(state, server.AddressFile))
		switch {
		case err == nil:
			cfg.URL = strings.TrimSpace(string(b))
		case errors.Is(err, fs.ErrNotExist):
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "no server is known: there is no --url, and none runs on %s", state).
				WithNext(`start one with "stockade serve", or name one with --url and --key-file`)
		default:
			return nil, errdefs.Wrap(err, errdefs.Denied, "the state directory %s cannot be read: %v", state, fsReason(err)).
				WithNext("run as the server's user, or give --url and --key-file")
		}
	}
	if cfg.Key == "" && cfg.KeyFile == "" {
		cfg.KeyFile = filepath.Join(state, keyName)
		if _, err := os.Stat(cfg.KeyFile); err != nil {
			return nil, errdefs.Wrap(err, errdefs.Unauthenticated, "no key: %s cannot be read: %v", cfg.KeyFile, fsReason(err)).
				WithNext("give --key-file, or STOCKADE_KEY")
		}
	}
	return client.New(cfg)
}

// silence says, at most once in half a minute, that the server is being waited for.
func (a *app) silence() {
	now := time.Now().Unix()
	if last := a.silent.Load(); now-last >= 30 && a.silent.CompareAndSwap(last, now) && !a.json {
		a.say("stockade: the server does not answer; trying again …")
	}
}

func fsReason(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// pages collects every page of a list, up to a bound that protects the terminal.
func pages[T any](ctx context.Context, id func(T) string, fetch func(context.Context, client.Page) (client.List[T], error)) ([]T, error) {
	const most = 10000
	all := []T{}
	page := client.Page{Limit: 500}
	for {
		l, err := fetch(ctx, page)
		if err != nil {
			return nil, err
		}
		all = append(all, l.Items...)
		if l.Next == "" || len(l.Items) == 0 || len(all) >= most {
			return all, nil
		}
		page.After = l.Next
	}
}

// resolve finds the one full id that text stands for: an id itself, or the
// beginning or end of one, as people copy them from a table. list is the command
// that shows such a table.
func resolve[T any](what, list, text string, items []T, id func(T) string) (string, error) {
	var found []string
	for _, it := range items {
		full := id(it)
		if full == text {
			return full, nil
		}
		_, bare, _ := strings.Cut(full, "_")
		if len(text) >= 4 && (strings.HasPrefix(full, text) || strings.HasPrefix(bare, text) || strings.HasSuffix(full, text)) {
			found = append(found, full)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return "", errdefs.New(errdefs.NotFound, "there is no %s %q", what, text).WithNext("%s lists what there is", list)
	default:
		return "", errdefs.New(errdefs.Invalid, "%q stands for more than one %s: %d", text, what, len(found)).WithNext("give more of the id: %s", strings.Join(found[:min(3, len(found))], ", "))
	}
}

// bounded gives a clean-up its own time, also after the command was interrupted.
func bounded(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), d)
}
