-- An order business, in the manner of the public trading and cycle-maker samples: many schemas,
-- extensions, domains over everything, camel case, xml, money, smallint keys, no keys.
CREATE EXTENSION "uuid-ossp";
CREATE SCHEMA ext;
CREATE EXTENSION citext WITH SCHEMA ext;
CREATE EXTENSION btree_gist WITH SCHEMA ext;
CREATE EXTENSION hstore WITH SCHEMA ext;
CREATE SCHEMA person;
CREATE SCHEMA sales;
CREATE SCHEMA production;
CREATE DOMAIN "AccountNumber" varchar(15);
CREATE DOMAIN "Flag" boolean NOT NULL;
CREATE DOMAIN "Name" varchar(50);
CREATE DOMAIN "ShortName" AS "Name" DEFAULT 'none' CHECK (length(VALUE) < 20);
CREATE DOMAIN positive_amounts AS numeric(10, 2)[] CHECK (0 < ALL (VALUE));
CREATE TABLE person.businessentity (businessentityid serial NOT NULL,
  rowguid uuid NOT NULL CONSTRAINT df_rowguid DEFAULT (uuid_generate_v1()),
  modifieddate timestamp NOT NULL DEFAULT (now()));
ALTER TABLE person.businessentity ADD CONSTRAINT "PK_BusinessEntity_BusinessEntityID"
  PRIMARY KEY (businessentityid);
CLUSTER person.businessentity USING "PK_BusinessEntity_BusinessEntityID";
CREATE TABLE person.person (businessentityid integer NOT NULL PRIMARY KEY REFERENCES person.businessentity,
  persontype char(2) NOT NULL, namestyle "Flag" DEFAULT false, title varchar(8) NULL,
  firstname "Name" NOT NULL, short "ShortName", additionalcontactinfo xml, demographics xml, email ext.citext,
  attributes ext.hstore,
  CONSTRAINT "CK_Person_PersonType" CHECK (persontype IS NULL OR upper(persontype) IN ('SC', 'VC', 'IN', 'EM')));
CREATE UNIQUE INDEX person_email ON person.person (email) WHERE email IS NOT NULL;
CREATE TABLE sales.territory ("TerritoryID" smallint PRIMARY KEY, "Name" "Name", salesytd money DEFAULT 0.00,
  picture bytea, ratio real, parent smallint REFERENCES sales.territory);
CREATE TABLE sales."Order Details" (order_id smallint NOT NULL, product_id smallint NOT NULL,
  unit_price real NOT NULL, discounts positive_amounts,
  CONSTRAINT pk_order_details PRIMARY KEY (order_id, product_id) INCLUDE (unit_price));
CREATE TABLE sales.log (at timestamptz DEFAULT clock_timestamp(), what text);
CREATE TABLE production.document (title varchar(50), owner integer NOT NULL REFERENCES person.person,
  rowguid uuid NOT NULL UNIQUE DEFAULT uuid_generate_v1(), body text COLLATE "C",
  node varchar DEFAULT '/' PRIMARY KEY, period tsrange, amount money,
  EXCLUDE USING gist (owner WITH =, period WITH &&));
CREATE UNLOGGED TABLE sales.cache (id integer PRIMARY KEY);
CREATE VIEW sales.vperson AS SELECT p.*, b.rowguid FROM person.person p JOIN person.businessentity b USING (businessentityid);

INSERT INTO person.businessentity (businessentityid) SELECT nextval('person.businessentity_businessentityid_seq')
  FROM generate_series(1, 100);
INSERT INTO person.person SELECT i, 'EM', i % 2 = 0, NULL, 'Name' || i, 'short', '<a b="1"><c/></a>', '<x>é</x>',
  'U' || i || '@X.org', 'a=>1, b=>NULL' FROM generate_series(1, 100) i;
INSERT INTO sales.territory SELECT i, 'T' || i, i * 1000.5, decode(md5(i::text), 'hex'), i / 3.0, NULLIF(i / 2, 0)
  FROM generate_series(1, 50) i;
INSERT INTO sales."Order Details" SELECT i, i % 7, i / 7.0, ARRAY[0.1, i] FROM generate_series(1, 300) i;
INSERT INTO sales.log (what) SELECT 'entry ' || i FROM generate_series(1, 50) i;
INSERT INTO production.document (title, owner, node, period, amount)
  SELECT 'D' || i, 1 + i % 100, '/' || i, tsrange('2020-01-01'::timestamp + i * interval '1 day', '2020-01-02'::timestamp + i * interval '1 day'), i
  FROM generate_series(1, 200) i;
